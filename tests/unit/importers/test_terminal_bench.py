"""Tasks of Terminal-Bench 1 and registries of Harbor tasks."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from rollouts.importers.base import RejectedTask, TaskRecord, TaskRejected
from rollouts.importers.harbor_registry import read_harbor_registry
from rollouts.importers.terminal_bench import TEST_SCRIPT, read_terminal_bench_task

FILES = {
    "task.yaml": "instruction: |\n  Do it.\ndifficulty: easy\nparser_name: pytest\n"
    "max_agent_timeout_sec: 90.5\n",
    "Dockerfile": "FROM ghcr.io/org/base:1\nWORKDIR /app\nCOPY data.txt /app/\n",
    "data.txt": "x\n",
    "docker-compose.yaml": "services:\n  client:\n    build: .\n",
    "run-tests.sh": "uv run pytest $TEST_DIR/test_outputs.py -rA\n",
    "tests/test_outputs.py": "def test_it(): pass\n",
    "solution.sh": "true\n",
}


@pytest.fixture
def task(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / "fix-it" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "fix-it"


def test_a_sound_task_is_read_whole(task: Path) -> None:
    record = read_terminal_bench_task(task)
    assert (record.ref, record.instruction, record.evaluator) == ("fix-it", "Do it.\n", "script")
    assert (record.agent_timeout_seconds, record.verifier_timeout_seconds) == (90.5, 60.0)
    assert sorted(record.tests) == ["run-tests.sh", "test.sh", "test_outputs.py"]
    assert sorted(record.solution) == ["solve.sh"]
    assert record.build is not None
    assert "From: ghcr.io/org/base:1\n" in record.build.definition
    assert record.environment == {"workdir": "/app"}
    assert record.metadata == {"difficulty": "easy"}


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("task.yaml", "a: [", "task.yaml is not YAML"),
        ("task.yaml", "- a", "must be a table"),
        ("task.yaml", "parser_name: pytest", "has no instruction"),
        ("task.yaml", "instruction: x\nparser_name: swebench", "parser_name is 'swebench'"),
        ("task.yaml", "instruction: x\nmax_test_timeout_sec: -1", "must be above 0"),
        ("task.yaml", "instruction: !!python/object:os.system x", "task.yaml is not YAML"),
        ("task.yaml", "instruction: x\na: &a [1]\nb: [*a, *a]", r"task.yaml holds the alias \*a"),
        ("docker-compose.yaml", "services: {a: {}, b: {}}", "the services a, b; several"),
        ("docker-compose.yaml", "x: &x {a: {}}\nservices: {<<: *x}", "several containers"),
        ("Dockerfile", "FROM a\nFROM b\n", "begins a second stage"),
    ],
)
def test_bad_tasks_are_refused(task: Path, name: str, text: str, reason: str) -> None:
    (task / name).write_text(text)
    with pytest.raises(TaskRejected, match=reason):
        read_terminal_bench_task(task)


def test_merged_keys_of_a_composition_are_not_multiplied(task: Path) -> None:
    levels = [f"m{n}: &m{n} {{<<: [{', '.join([f'*m{n - 1}'] * 10)}]}}" for n in range(1, 12)]
    compose = "\n".join(["m0: &m0 {a: 1}", *levels, "services: {client: {build: .}}"])
    (task / "docker-compose.yaml").write_text(compose)
    assert read_terminal_bench_task(task).ref == "fix-it"


@pytest.mark.parametrize(
    ("log", "reward"),
    [
        ("== short test summary info ==\nPASSED a::x\nSKIPPED [1] a.py\nXFAIL a::y - why\n", "1"),
        ("== short test summary info ==\nPASSED a::x\nFAILED a::y - no\n", "0"),
        ("== short test summary info ==\nPASSED a::x\nERROR a::y\n", "0"),
        ("== short test summary info ==\nPASSED a::x\nXPASS a::y\n", "0"),
        ("PASSED a::x\n== 1 passed ==\n", "0"),
        ("== short test summary info ==\n", "0"),
        ("", "0"),
    ],
)
def test_the_reward_is_what_the_summary_says(tmp_path: Path, log: str, reward: str) -> None:
    (tmp_path / "log").write_text(log)
    awk = TEST_SCRIPT.split("awk '")[1].split("' /logs")[0]
    said = subprocess.run(
        ["awk", awk, str(tmp_path / "log")], capture_output=True, text=True, check=True
    )
    assert said.stdout.strip() == reward


def test_a_registry_names_folders_below_its_own(tmp_path: Path) -> None:
    for name, text in {
        "task.toml": 'schema_version = "1.4"\n',
        "instruction.md": "Do it.",
        "tests/test.sh": "true\n",
    }.items():
        path = tmp_path / "tasks" / "one" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    tasks = [
        {"name": "one", "path": "tasks/one"},
        {
            "name": "far",
            "path": "x",
            "git_url": "https://example.org/t.git",
            "git_commit_id": "abc",
        },
        {"name": "up", "path": "../up"},
        {"name": "none"},
    ]
    registry = tmp_path / "registry.json"
    registry.write_text(json.dumps([{"name": "set", "version": "1", "tasks": tasks}]))

    found = list(read_harbor_registry(registry))

    assert isinstance(found[0], TaskRecord)
    reasons = [each.reason for each in found[1:] if isinstance(each, RejectedTask)]
    assert reasons == [
        "the task lies at https://example.org/t.git, and nothing is fetched here: clone that "
        "repository at abc, and import its folder",
        "path '../up' leads out of the registry's folder",
        "an entry needs a 'path'",
    ]
