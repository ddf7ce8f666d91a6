"""Grade a package by its answers: it runs in a process of its own, the comparing is done here."""

import contextlib
import json
import os
import signal
import subprocess
import traceback
from pathlib import Path

REWARD = Path("/logs/verifier/reward.json")


CALLS = [
    ("merge", [[[1, 4], [3, 6], [8, 9]]], [[1, 6], [8, 9]]),
    ("merge", [[[1, 10], [2, 3]]], [[1, 10]]),
    ("merge", [[[1, 3], [3, 5]]], [[1, 5]]),
    ("merge", [[[5, 7], [1, 2], [2, 3]]], [[1, 3], [5, 7]]),
    ("merge", [[]], []),
    ("merge", [[[-5, -1], [-3, 4], [-4, -2]]], [[-5, 4]]),
    ("subtract", [[[0, 10]], [[3, 5]]], [[0, 3], [5, 10]]),
    ("subtract", [[[0, 10], [2, 3]], [[9, 12]]], [[0, 9]]),
    ("subtract", [[[0, 4], [4, 8]], [[0, 8]]], []),
    ("subtract", [[[0, 4]], [[4, 8]]], [[0, 4]]),
    ("total", [[[0, 5], [3, 8]]], 8),
    ("total", [[[0, 9], [1, 2], [9, 10]]], 10),
    ("total", [[]], 0),
]
CALLER = """
import json, sys
sys.path.insert(0, "/app")
name, arguments = json.loads(sys.stdin.read())
import intervals
as_tuples = [[tuple(pair) for pair in argument] for argument in arguments]
print("\\n" + json.dumps(getattr(intervals, name)(*as_tuples)))
"""


def answer(name: str, arguments: list[object]) -> object:
    """Return what the function answers; None when it fails or does not end."""
    process = subprocess.Popen(
        ["/usr/bin/python3", "-I", "-S", "-B", "-c", CALLER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd="/",
        start_new_session=True,
        env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"},
    )
    try:
        printed, _ = process.communicate(json.dumps([name, arguments]).encode(), timeout=3)
        return json.loads(printed.decode().strip().split("\n")[-1])
    except (subprocess.TimeoutExpired, ValueError):
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def grade() -> dict[str, float]:
    """Pay only when every answer is right; `cases` tells how many are."""
    right = 0
    for name, arguments, expected in CALLS:
        given = answer(name, arguments)
        print(f"{name}{arguments} -> {given}")
        right += given == expected
    return {"reward": float(right == len(CALLS)), "cases": right / len(CALLS)}


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
