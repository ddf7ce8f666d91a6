"""The arithmetic set and the demonstrations that stand before the examples."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from evaluators.base import Artefacts
from evaluators.registry import get_evaluator
from rollouts.handlers.one_line import parse_one_line
from rollouts.handlers.registry import get_handler
from rollouts.importers.base import TaskRecord
from rollouts.importers.harbor import read_harbor_folder
from rollouts.importers.jsonl import read_jsonl

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
QUESTION = re.compile(r"What is (\d+) ([-+*]) (\d+)\?")


def arithmetic() -> list[TaskRecord]:
    """Read the arithmetic set, of which no line may be rejected."""
    entries = list(read_jsonl(EXAMPLES / "arithmetic/tasks.jsonl"))
    records = [entry for entry in entries if isinstance(entry, TaskRecord)]
    assert records == entries
    return records


def reward(task: TaskRecord, answer: str) -> float:
    """Score one answer."""
    evaluator = get_evaluator(task.evaluator)
    artefacts = Artefacts(answer=answer)
    return evaluator.score(task.evaluator_settings, task.evaluator_payload, artefacts).reward


def test_every_sum_pays_its_result_and_nothing_else() -> None:
    assert len(arithmetic()) >= 20
    for task in arithmetic():
        match = QUESTION.fullmatch(task.instruction)
        assert match is not None
        left, right = int(match[1]), int(match[3])
        result = {"+": left + right, "-": left - right, "*": left * right}[match[2]]
        assert reward(task, f"{result}") == 1.0
        assert reward(task, f"{left} {match[2]} {right} = {result}.\n") == 1.0
        assert reward(task, f"{left} {match[2]} {right} = {result + 1}") == 0.0
        assert reward(task, f"{result}{result}") == 0.0
        assert reward(task, "I do not know") == 0.0
        assert reward(task, "") == 0.0


@pytest.mark.parametrize(
    ("folder", "handler"), [("arithmetic", "single_turn"), ("demo_tasks", "command_line")]
)
def test_demonstrations_are_settings_of_their_handler(folder: str, handler: str) -> None:
    demonstrations = json.loads((EXAMPLES / folder / "demonstrations.json").read_text())
    assert demonstrations
    get_handler(handler).validate({"demonstrations": demonstrations})


def test_demonstrations_give_no_task_away() -> None:
    asked = {task.instruction.strip() for task in arithmetic()}
    for entry in read_harbor_folder(EXAMPLES / "demo_tasks"):
        assert isinstance(entry, TaskRecord)
        asked.add(entry.instruction.strip())
    for folder in ("arithmetic", "demo_tasks"):
        demonstrations = json.loads((EXAMPLES / folder / "demonstrations.json").read_text())
        assert asked.isdisjoint(turn["content"] for shown in demonstrations for turn in shown)


def test_the_shell_demonstrations_are_lines_that_the_agent_understands() -> None:
    for shown in json.loads((EXAMPLES / "demo_tasks/demonstrations.json").read_text()):
        kinds = [parse_one_line(turn["content"], complete=True).kind for turn in shown[1::2]]
        assert kinds == ["command", "submit"]
