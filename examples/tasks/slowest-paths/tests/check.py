"""Grade three lines: a third for each one in its place."""

import traceback
from pathlib import Path

REWARD = Path("/logs/verifier/reward.txt")


def output(path: str) -> str:
    """Return the text of a plain file that the agent left; empty when there is none."""
    file = Path(path)
    if not file.is_file() or file.stat().st_size > 1_000_000:
        return ""
    return file.read_bytes().decode("utf-8", errors="replace")


EXPECTED = ["/api/orders 243.2", "/search 213.0", "/cart 116.2"]


def grade() -> float:
    """Pay a third for each line in its place; more than three lines are worth nothing."""
    given = [line.strip() for line in output("/app/slowest.txt").strip().split("\n")]
    if len(given) > len(EXPECTED):
        return 0.0
    right = sum(mine == theirs for mine, theirs in zip(given, EXPECTED, strict=False))
    return right / len(EXPECTED)


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
