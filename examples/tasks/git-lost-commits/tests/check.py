"""Grade where two branches point."""

import subprocess
import traceback
from pathlib import Path

REWARD = Path("/logs/verifier/reward.txt")


def output(path: str) -> str:
    """Return the text of a plain file that the agent left; empty when there is none."""
    file = Path(path)
    if not file.is_file() or file.stat().st_size > 1_000_000:
        return ""
    return file.read_bytes().decode("utf-8", errors="replace")


MAIN = "78f49b9b058e0e14cf00f42ed7a2b65cbc2645d2"
LOST = "bf2089b217d7a48b9bb31664b3b63a2936368a63"
LOST_BEFORE = "93dedf94caac8e2fd32e83c7a28ec0a36bd7bd25"


def git(*arguments: str) -> bytes:
    """Return what git's plumbing prints about the repository; empty when it fails."""
    command = [
        "/usr/bin/git",
        "-c",
        "safe.directory=*",
        "-c",
        "core.fsmonitor=false",
        "-c",
        "core.hooksPath=/dev/null",
        "--no-replace-objects",
        "-C",
        "/app/repo",
    ]
    environment = {
        "PATH": "/usr/bin:/bin",
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": "/dev/null",
        "HOME": "/nonexistent",
    }
    done = subprocess.run(
        [*command, *arguments], env=environment, capture_output=True, timeout=20, check=False
    )
    return done.stdout if done.returncode == 0 else b""


def grade() -> float:
    """Pay in full for the last lost commit, half for the one before it."""
    if git("rev-parse", "--verify", "refs/heads/main").decode().strip() != MAIN:
        return 0.0
    recovered = git("rev-parse", "--verify", "refs/heads/recovered").decode().strip()
    if git("cat-file", "-t", recovered or "none") != b"commit\n":
        return 0.0
    return {LOST: 1.0, LOST_BEFORE: 0.5}.get(recovered, 0.0)


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
