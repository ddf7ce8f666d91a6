"""Grade which files are left: each deletion counts, a lost file is worth nothing."""

import traceback
from pathlib import Path

REWARD = Path("/logs/verifier/reward.txt")


def output(path: str) -> str:
    """Return the text of a plain file that the agent left; empty when there is none."""
    file = Path(path)
    if not file.is_file() or file.stat().st_size > 1_000_000:
        return ""
    return file.read_bytes().decode("utf-8", errors="replace")


KEPT = {
    "a.txt": "alpha\n",
    "b.txt": "beta\n",
    "sub/c.txt": "gamma\n",
    "sub/similar.txt": "alpha \n",
}
DUPLICATES = ["copy of a.txt", "sub/a again.txt", "sub/d.txt", "z.txt"]


def grade() -> float:
    """Pay a share for each duplicate that is gone, nothing when another file is."""
    for name, content in KEPT.items():
        if output(f"/app/docs/{name}") != content:
            print(f"{name} is missing or changed")
            return 0.0
    gone = sum(not Path(f"/app/docs/{name}").exists() for name in DUPLICATES)
    return gone / len(DUPLICATES)


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
