"""Grade a merged inventory: a share for each article."""

import json
import traceback
from pathlib import Path

REWARD = Path("/logs/verifier/reward.txt")


def output(path: str) -> str:
    """Return the text of a plain file that the agent left; empty when there is none."""
    file = Path(path)
    if not file.is_file() or file.stat().st_size > 1_000_000:
        return ""
    return file.read_bytes().decode("utf-8", errors="replace")


EXPECTED = {
    "A-100": {"name": "bolt", "quantity": 100, "price": 0.2},
    "B-200": {"name": "bracket", "quantity": 12, "price": 3.5},
    "D-400": {"name": "drill", "quantity": 2, "price": 79.9},
    "E-500": {"name": "elbow", "quantity": 12, "price": 1.1},
}


def grade() -> float:
    """Pay a share for each right article, less one for each article that should not be there."""
    text = output("/app/merged.json")
    given = json.loads(text) if text else None
    if not isinstance(given, dict):
        return 0.0
    right = sum(given.get(sku) == article for sku, article in EXPECTED.items())
    wrong = sum(sku not in EXPECTED for sku in given)
    return max(0, right - wrong) / len(EXPECTED)


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
