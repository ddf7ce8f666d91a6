"""Every example task is worth 1 when solved, less when nothing is done or the grader is baited."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from evaluators.base import Score
from evaluators.registry import get_evaluator
from rollouts.importers.base import FileContent, Files, TaskRecord
from rollouts.importers.harbor import read_harbor_folder
from tests.script_left import script_artefacts
from tests.unit.examples.plain_root import attempt, missing

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"

BAIT = b"""#!/bin/bash
mkdir -p /logs/verifier /tests
echo '{"reward": 1.0}' > /logs/verifier/reward.json
echo 1.0 > /logs/verifier/reward.txt
for folder in /app /tests /root /tmp; do
    for module in json os pathlib stat subprocess traceback zipfile sitecustomize usercustomize; do
        echo 'open("/logs/verifier/reward.txt", "w").write("1.0"); raise SystemExit' \\
            > "$folder/$module.py"
    done
    echo 'echo 1.0 > /logs/verifier/reward.txt; exit 0' > "$folder/.bashrc"
    printf '#!/bin/bash\\necho 1.0 > /logs/verifier/reward.txt\\n' > "$folder/python3"
    chmod +x "$folder/python3"
done
"""


def load(name: str) -> list[TaskRecord]:
    """Read a folder of tasks, none of which may be rejected."""
    read = list(read_harbor_folder(EXAMPLES / name))
    records = [record for record in read if isinstance(record, TaskRecord)]
    assert read == records, [entry for entry in read if not isinstance(entry, TaskRecord)]
    return records


TASKS = load("tasks") + load("demo_tasks")
each_task = pytest.mark.parametrize("task", TASKS, ids=lambda task: task.ref)


@pytest.fixture(autouse=True)
def _needs_a_root(request: pytest.FixtureRequest) -> None:
    if "tmp_path" not in request.fixturenames:
        return
    reason = missing()
    if reason is not None and os.environ.get("CI"):
        pytest.fail(reason)
    if reason is not None:
        pytest.skip(reason)


def graded(task: TaskRecord, agent: Files, folder: Path) -> Score:
    """Return the score of one attempt, as the task's own evaluator sees it."""
    outcome = attempt(task, agent, folder)
    artefacts = script_artefacts(outcome.reward_json, outcome.reward_txt, log=outcome.log.encode())
    return get_evaluator(task.evaluator).score(
        task.evaluator_settings, task.evaluator_payload, artefacts
    )


@each_task
def test_solution_earns_the_full_reward(task: TaskRecord, tmp_path: Path) -> None:
    score = graded(task, task.solution, tmp_path)
    assert score.reward == 1.0, score.log


@each_task
def test_doing_nothing_earns_less(task: TaskRecord, tmp_path: Path) -> None:
    score = graded(task, {}, tmp_path)
    assert score.reward < 1.0, score.log


@each_task
def test_planted_files_do_not_buy_a_reward(task: TaskRecord, tmp_path: Path) -> None:
    bait = {"solve.sh": FileContent(data=BAIT, mode=0o755)}
    score = graded(task, bait, tmp_path)
    assert score.reward < 1.0, score.log


def test_there_are_enough_tasks_of_each_kind() -> None:
    assert len(load("tasks")) >= 12
    assert len(load("demo_tasks")) >= 4
    with_map = [
        task.ref for task in load("tasks") if b'reward.json")' in task.tests["check.py"].data
    ]
    assert len(with_map) >= 2


@each_task
def test_tasks_ask_for_no_network_and_have_every_part(task: TaskRecord) -> None:
    assert task.environment["network_mode"] == "no-network"
    assert task.environment["workdir"] == "/app"
    assert task.setup is not None
    assert set(task.solution) == {"solve.sh"}
    assert task.evaluator_settings == {"range": [0.0, 1.0]}
