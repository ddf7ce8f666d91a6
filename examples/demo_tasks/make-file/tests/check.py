"""Grade one simple file operation."""

import traceback
from pathlib import Path

REWARD = Path("/logs/verifier/reward.txt")


def grade() -> float:
    """Pay when the one thing asked for was done."""
    return float(Path("/app/banana.txt").is_file())


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
