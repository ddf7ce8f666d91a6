"""Grade edited files: a third for each, nothing when another file suffered."""

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
    "conf/web.conf": "# was old.example.com until spring\nhost = new.example.net\nport = 80\n",
    "conf/db.conf": "host=new.example.net:5432\nreplica=db2.new.example.net\n",
    "conf/sub/mail.conf": "relay = new.example.net # by new.example.net\nhelo = oldXexample.com\n",
}
NOTES = "move off old.example.com\n"


def grade() -> float:
    """Pay a third for each right file."""
    if output("/app/conf/notes.txt") != NOTES:
        return 0.0
    right = sum(output(f"/app/{name}") == text for name, text in EXPECTED.items())
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
