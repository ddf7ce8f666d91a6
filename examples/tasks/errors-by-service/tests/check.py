"""Grade a report in CSV."""

import json
import traceback
from pathlib import Path

REWARD = Path("/logs/verifier/reward.json")


def output(path: str) -> str:
    """Return the text of a plain file that the agent left; empty when there is none."""
    file = Path(path)
    if not file.is_file() or file.stat().st_size > 1_000_000:
        return ""
    return file.read_bytes().decode("utf-8", errors="replace")


EXPECTED = [
    "auth,14",
    "catalog,10",
    "billing,9",
    "mailer,6",
    "search,4",
]


def grade() -> dict[str, float]:
    """Pay in full for the exact report, in part for right rows."""
    lines = output("/app/report.csv").replace("\r\n", "\n").strip().split("\n")
    header = lines[0].strip() == "service,errors"
    given = [line.strip() for line in lines[1:]]
    if len(given) > 2 * len(EXPECTED):
        given = []
    right = len(set(given) & set(EXPECTED)) / max(len(EXPECTED), len(given))
    exact = header and given == EXPECTED
    reward = 1.0 if exact else 0.5 * right
    return {"reward": reward, "header": float(header), "rows": right}


def main() -> None:
    """Write the rewards; output that cannot even be looked at is worth nothing."""
    try:
        rewards = grade()
    except Exception:
        traceback.print_exc()
        rewards = {"reward": 0.0}
    REWARD.parent.mkdir(parents=True, exist_ok=True)
    for name in ("reward.json", "reward.txt"):
        REWARD.with_name(name).unlink(missing_ok=True)
    REWARD.write_text(json.dumps(rewards) + "\n", encoding="utf-8")
    print(f"rewards {rewards}")


main()
