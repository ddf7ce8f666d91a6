"""Grade a JSON document against the expected one."""

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


EXPECTED = [
    {
        "id": 3,
        "name": "Bjorn Lund",
        "email": "bjorn@example.com",
        "joined": "2019-11-20",
        "score": None,
    },
    {
        "id": 5,
        "name": "Zoë Petit",
        "email": None,
        "joined": "2020-07-01",
        "score": 73.25,
    },
    {
        "id": 7,
        "name": "Okafor, Ada",
        "email": "ada@example.com",
        "joined": "2021-04-03",
        "score": 91.5,
    },
    {
        "id": 9,
        "name": "Ruiz, Tomás",
        "email": "tomas@example.com",
        "joined": "2023-02-28",
        "score": 100,
    },
    {
        "id": 12,
        "name": 'Mei "May" Lin',
        "email": "may@example.com",
        "joined": "2022-01-15",
        "score": 88,
    },
]


def grade() -> float:
    """Pay in full for the right document, half for right objects in a wrong order."""
    text = output("/app/members.json")
    given = json.loads(text) if text else None
    if not isinstance(given, list) or len(given) != len(EXPECTED):
        return 0.0
    if any(not isinstance(row, dict) or isinstance(row.get("id"), bool) for row in given):
        return 0.0
    if given == EXPECTED:
        return 1.0
    return 0.5 if all(row in given for row in EXPECTED) else 0.0


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
