"""Repository tasks and programs over the whole line, with real sandboxes."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.e2e.harness import JSON, Line, marker
from tests.sandbox.test_swe_grading import FIX, PREPARE, TEST_PATCH


def run(line: Line, folder: Path, name: str, tasks: Sequence[JSON], **values: Any) -> list[JSON]:
    """Play tasks with their turns in an environment of their own; return the ended rollouts."""
    body = {"name": name, "image": "base", "agent": "command_line", "tools": ["bash", "submit"]}
    line.operator.call("POST", "/environments/", {**body, **values})
    rows = folder / f"{name}.jsonl"
    fields = ("ref", "evaluator", "evaluator_settings", "evaluator_payload")
    rows.write_text(
        "\n".join(
            json.dumps(
                {field: task[field] for field in fields} | {"instruction": marker(task["ref"])}
            )
            for task in tasks
        )
    )
    line.stack.manage("import_tasks", "jsonl", str(rows), "--set", name, "--environment", name)
    line.server.play(
        *[{"marker": marker(t["ref"]), "turns": [*t["turns"], "submit"]} for t in tasks]
    )
    rollouts = line.submit(line.experiment(name), [task["ref"] for task in tasks])
    done = {rollout["task_ref"]: rollout for rollout in line.wait_done(rollouts, seconds=180)}
    return [done[task["ref"]] for task in tasks]


def test_only_a_fix_of_the_repository_is_paid(line: Line, tmp_path: Path) -> None:
    payload = {
        "base_commit": "",
        "test_patch": TEST_PATCH,
        "FAIL_TO_PASS": '["test_two (tests.test_calc.TestAdd.test_two)"]',
        "PASS_TO_PASS": '["test_zero (tests.test_calc.TestAdd.test_zero)"]',
        "test_cmd": "python3 -m unittest -v",
        "log_parser": "unittest",
    }
    without = {**payload, "workdir": "/nowhere"}
    tasks = [
        {
            "ref": f"swe-{name}",
            "evaluator": "swe",
            "evaluator_settings": {},
            "evaluator_payload": given,
            "turns": [turn],
        }
        for name, given, turn in (
            ("fixed", payload, FIX + "printf '\\000' > new.bin; git add -A; git commit -qm fix"),
            ("idle", payload, "cd /testbed; git log --oneline"),
            ("removed", payload, "rm -rf /testbed/.git"),
            # The tests are back where they were.
            ("moved", payload, FIX + "mv tests elsewhere; printf 'x' > elsewhere/__init__.py"),
            ("unfit", without, "cd /"),
        )
    ]
    fixed, idle, removed, moved, unfit = run(
        line, tmp_path, "swe-line", tasks, setup=PREPARE, workdir="/testbed"
    )
    assert (fixed["outcome"], fixed["reward"]) == ("scored", 1.0)
    assert (idle["outcome"], idle["reward"]) == ("scored", 0.0)
    assert (removed["outcome"], removed["reward"]) == ("scored", 0.0)
    assert (moved["outcome"], moved["reward"]) == ("scored", 1.0)
    assert (unfit["outcome"], unfit["reward"]) == ("infra_failed", None)
    assert unfit["failure_code"] == "evaluator.task_unfit"


def test_only_a_right_program_is_paid(line: Line, tmp_path: Path) -> None:
    pairs = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}
    tasks = [
        {
            "ref": f"code-{name}",
            "evaluator": "code",
            "evaluator_settings": {"path": "/app/main.py", "reward": "pass_rate"},
            "evaluator_payload": pairs,
            "turns": [turn],
        }
        for name, turn in (
            ("right", "echo 'print(sum(map(int, input().split())))' > /app/main.py"),
            ("half", "echo 'print(3)' > /app/main.py"),
            ("none", "true"),
        )
    ]
    done = run(line, tmp_path, "code-line", tasks)
    assert [(each["outcome"], each["reward"]) for each in done] == [
        ("scored", 1.0),
        ("scored", 0.5),
        ("scored", 0.0),
    ]
