"""Grade renamed files: a share for each, nothing when another file suffered."""

import traceback
from pathlib import Path

REWARD = Path("/logs/verifier/reward.txt")


def output(path: str) -> str:
    """Return the text of a plain file that the agent left; empty when there is none."""
    file = Path(path)
    if not file.is_file() or file.stat().st_size > 1_000_000:
        return ""
    return file.read_bytes().decode("utf-8", errors="replace")


RENAMED = {
    "photos/beach": "beach 01\n",
    "photos/forest": "forest 02\n",
    "photos/my cat": "cat 03\n",
    "photos/2023/lake": "lake 04\n",
    "photos/2023/snow day": "snow 05\n",
    "photos/2024/a.b": "dots 06\n",
    "photos/2024/old/attic": "attic 07\n",
    "photos/2024/old/-dash": "dash 08\n",
}
UNTOUCHED = {
    "photos/cover.jpeg.bak": "backup\n",
    "photos/readme.txt": "about jpeg files\n",
    "photos/2023/jpeg": "a plain name\n",
}


def grade() -> float:
    """Pay for each file that has its new name, its old content and no old name."""
    for name, content in UNTOUCHED.items():
        if output(f"/app/{name}") != content:
            print(f"{name} was changed")
            return 0.0
    done = [
        output(f"/app/{stem}.jpg") == content and not Path(f"/app/{stem}.jpeg").exists()
        for stem, content in RENAMED.items()
    ]
    return sum(done) / len(done)


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
