"""Every example task through the whole line: its own solution scores 1, doing nothing less."""

import base64
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from prorl_site.stack.processes import ROOT
from tests.e2e.harness import JSON, Line

FOLDERS = {
    "examples-tasks": ROOT / "examples" / "tasks",
    "examples-demo": ROOT / "examples" / "demo_tasks",
}


def task_folders(folder: Path) -> list[Path]:
    return sorted(path.parent for path in folder.glob("*/task.toml"))


def solution_part(folder: Path) -> JSON:
    """Return what the scripted server plays: one command that carries the whole solution."""
    files = {path.name: path.read_bytes() for path in (folder / "solution").iterdir()}
    writes = [
        f"echo {base64.b64encode(data).decode()} | base64 -d > /solution/{name}"
        for name, data in files.items()
    ]
    command = " && ".join(["mkdir -p /solution", *writes, "bash /solution/solve.sh"])
    instruction = (folder / "instruction.md").read_text().strip()
    return {"marker": instruction, "turns": [command, "submit"], "after": "submit"}


def test_there_are_at_least_twelve_terminal_tasks() -> None:
    assert len(task_folders(FOLDERS["examples-tasks"])) >= 12


@pytest.mark.parametrize("name", FOLDERS)
def test_solutions_score_one_and_doing_nothing_scores_less(
    line: Line, import_folder: Callable[..., None], name: str
) -> None:
    folders = task_folders(FOLDERS[name])
    import_folder(name, FOLDERS[name])
    refs = [
        ref
        for (ref,) in line.sql(
            "SELECT t.ref FROM rollouts_task t JOIN rollouts_taskset s ON s.id = t.task_set_id "
            "WHERE s.name = %s ORDER BY t.ref",
            name,
        )
    ]
    assert len(refs) == len(folders)
    experiment = line.experiment(name)

    line.server.play(*[solution_part(folder) for folder in folders])
    solved = line.wait_done(line.submit(experiment, refs), seconds=180)
    line.server.play()
    untouched = line.wait_done(line.submit(experiment, refs), seconds=180)

    assert {r["task_ref"]: (r["outcome"], r["reward"]) for r in solved} == dict.fromkeys(
        refs, ("scored", 1.0)
    )
    assert {r["outcome"] for r in untouched} == {"scored"}
    assert [r["task_ref"] for r in untouched if not r["reward"] < 1] == []
    assert {r["tool_calls"] for r in solved} == {1}
    assert {r["tool_calls"] for r in untouched} == {0}


def test_arithmetic_right_answers_score_one_and_others_nothing(line: Line) -> None:
    path = ROOT / "examples" / "arithmetic" / "tasks.jsonl"
    tasks = [json.loads(text) for text in path.read_text().splitlines()]
    line.stack.manage(
        *("import_tasks", "jsonl", str(path), "--set", "sums", "--environment", "arithmetic")
    )
    experiment = line.experiment("sums")
    refs = [task["ref"] for task in tasks]

    line.server.play(
        *[{"marker": task["instruction"], "turns": [f"That is {task['answer']}"]} for task in tasks]
    )
    right = line.wait_done(line.submit(experiment, refs))
    line.server.play(
        *[{"marker": task["instruction"], "turns": ["I do not know."]} for task in tasks]
    )
    wrong = line.wait_done(line.submit(experiment, refs))

    assert {r["task_ref"]: (r["outcome"], r["reward"]) for r in right} == dict.fromkeys(
        refs, ("scored", 1.0)
    )
    assert {(r["outcome"], r["reward"]) for r in wrong} == {("scored", 0.0)}
    assert {r["node"] for r in right} == {None}
