"""Grade permission bits: a share for each entry."""

import stat
import traceback
from pathlib import Path

REWARD = Path("/logs/verifier/reward.txt")


def output(path: str) -> str:
    """Return the text of a plain file that the agent left; empty when there is none."""
    file = Path(path)
    if not file.is_file() or file.stat().st_size > 1_000_000:
        return ""
    return file.read_bytes().decode("utf-8", errors="replace")


MODES = {
    "/app/site": 0o755,
    "/app/site/public": 0o755,
    "/app/site/public/css": 0o755,
    "/app/site/bin": 0o755,
    "/app/site/keys": 0o755,
    "/app/site/public/index.html": 0o644,
    "/app/site/public/css/main style.css": 0o644,
    "/app/site/bin/start": 0o755,
    "/app/site/bin/stop": 0o755,
    "/app/site/keys/site.key": 0o600,
}
CONTENT = {
    "/app/site/public/index.html": "<h1>Hello</h1>\n",
    "/app/site/public/css/main style.css": "h1 { margin: 0 }\n",
    "/app/site/bin/start": "#!/bin/sh\necho started\n",
    "/app/site/bin/stop": "#!/bin/sh\necho stopped\n",
    "/app/site/keys/site.key": "not a real key\n",
}
ALREADY_RIGHT = 1  # /app/site/bin is 755 from the start and earns nothing


def grade() -> float:
    """Pay a share for each entry that had to change, nothing when a content changed."""
    for path, content in CONTENT.items():
        if output(path) != content:
            print(f"{path} was changed")
            return 0.0
    right = sum(stat.S_IMODE(Path(path).lstat().st_mode) == mode for path, mode in MODES.items())
    return max(0, right - ALREADY_RIGHT) / (len(MODES) - ALREADY_RIGHT)


def main() -> None:
    """Write the reward; output that cannot even be looked at is worth nothing."""
    try:
        reward = grade()
    except Exception:
        traceback.print_exc()
        reward = 0.0
    REWARD.parent.mkdir(parents=True, exist_ok=True)
    for name in ("reward.json", "reward.txt"):
        REWARD.with_name(name).unlink(missing_ok=True)
    REWARD.write_text(f"{reward}\n", encoding="utf-8")
    print(f"reward {reward}")


main()
