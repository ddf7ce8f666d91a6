"""Read tasks of Terminal-Bench 1: `task.yaml`, `Dockerfile`, `run-tests.sh`, `tests/`.

Its rule: every test that pytest's short summary names has passed (an expected failure or a
skipped test counts as passed, an unexpected pass as failed). `tests/test.sh`, made here, runs
`run-tests.sh` and writes that as the reward.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from rollouts.importers.base import FileContent, RejectedTask, TaskRecord, TaskRejected, json_copy
from rollouts.importers.folder import read_files, read_text
from rollouts.importers.harbor import check_ref_form, read_task_folders
from rollouts.importers.surroundings import surroundings_of

AGENT_SECONDS = 360.0
TEST_SECONDS = 60.0
_METADATA = (
    *("difficulty", "category", "tags", "author_name", "author_email", "estimated_duration_sec"),
    *("expert_time_estimate_min", "junior_time_estimate_min"),
)
_BESIDE = frozenset({"task.yaml", "docker-compose.yaml", "run-tests.sh", "solution.sh"})
TEST_SCRIPT = r"""#!/bin/bash
# Made at import: runs run-tests.sh and scores pytest's short summary as Terminal-Bench does.
export TEST_DIR=/tests
mkdir -p /logs/verifier
bash /tests/run-tests.sh > /logs/verifier/run-tests.log 2>&1
cat /logs/verifier/run-tests.log
awk '
  tolower($0) ~ /=+ *short test summary info *=+/ { summary = 1; passed = 0; failed = 0; next }
  !summary { next }
  /^(PASSED|XFAIL|SKIPPED):? +[^ ]/ { passed++ }
  /^(FAILED|ERROR|XPASS):? +[^ ]/ { failed++ }
  END { print (summary && passed > 0 && failed == 0) ? 1 : 0 }
' /logs/verifier/run-tests.log > /logs/verifier/reward.txt
"""


def read_terminal_bench_folder(path: Path) -> Iterator[TaskRecord | RejectedTask]:
    """Read every task folder in a folder, in name order; a bad task never hides the others."""
    return read_task_folders(path, read_terminal_bench_task)


def read_terminal_bench_task(path: Path) -> TaskRecord:
    """Read one task folder; raise `TaskRejected` with what to do about it."""
    config = _read_yaml(path)
    instruction = config.get("instruction")
    if not isinstance(instruction, str) or not instruction.strip():
        raise TaskRejected("task.yaml has no instruction; say in it what is to be done")
    parser = config.get("parser_name", "pytest")
    if parser != "pytest":
        raise TaskRejected(f"parser_name is {parser!r}; only pytest's summary is read here")
    if (path / "solution.yaml").exists() and not (path / "solution.sh").exists():
        raise TaskRejected("solution.yaml types into a terminal; write a solution.sh instead")
    files = read_files(path, inside=path)
    _refuse_services(files)
    tests = {
        name.removeprefix("tests/"): content
        for name, content in files.items()
        if name.startswith("tests/")
    }
    if "run-tests.sh" not in files:
        raise TaskRejected("run-tests.sh is missing; add the script that runs the tests")
    tests["run-tests.sh"] = files["run-tests.sh"]
    tests["test.sh"] = FileContent(data=TEST_SCRIPT.encode(), mode=0o755)
    context = {
        name: content
        for name, content in files.items()
        if name not in _BESIDE and not name.startswith(("tests/", "solution/"))
    }
    made = surroundings_of(context, image=None, workdir=None)
    solution = {"solve.sh": files["solution.sh"]} if "solution.sh" in files else {}
    asked = {"workdir": made.workdir, "env": dict(made.env)}
    metadata = {name: config[name] for name in _METADATA if config.get(name) is not None}
    if made.ignored:
        metadata["dockerfile_ignored"] = list(made.ignored)
    return TaskRecord(
        ref=check_ref_form(path.resolve().name),
        instruction=instruction,
        setup=made.setup,
        files=made.files,
        tests=tests,
        solution=solution,
        agent_timeout_seconds=_seconds(config, "max_agent_timeout_sec", AGENT_SECONDS),
        verifier_timeout_seconds=_seconds(config, "max_test_timeout_sec", TEST_SECONDS),
        build=made.build,
        environment=json_copy({k: v for k, v in asked.items() if v}, "task.yaml"),
        evaluator="script",
        metadata=json_copy(metadata, "task.yaml"),
    )


def _read_yaml(path: Path) -> Mapping[str, Any]:
    text = read_text(path / "task.yaml", inside=path)
    try:
        # A few lines of aliases of aliases stand for more than any memory holds.
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            if isinstance(event, yaml.AliasEvent):
                name = str(event.anchor)[:100]
                raise TaskRejected(f"task.yaml holds the alias *{name}; write its value there")
        config = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError) as fault:
        raise TaskRejected(f"task.yaml is not YAML: {str(fault)[:300]}; mend it") from fault
    if not isinstance(config, dict):
        raise TaskRejected("task.yaml must be a table")
    if "descriptions" in config and "instruction" not in config:
        raise TaskRejected("task.yaml has several descriptions; write one of them as instruction")
    return config


def _refuse_services(files: Mapping[str, FileContent]) -> None:
    """Refuse a composition of containers; the usual one has a single service."""
    compose = files.get("docker-compose.yaml")
    if compose is None:
        return
    try:
        # Compositions may hold aliases; a loader of texts only does not multiply what `<<` says.
        value = yaml.load(compose.data, Loader=yaml.BaseLoader)  # noqa: S506
    except (yaml.YAMLError, RecursionError, ValueError) as fault:
        raise TaskRejected(f"docker-compose.yaml is not YAML: {str(fault)[:300]}") from fault
    services = value.get("services") if isinstance(value, dict) else None
    if isinstance(services, dict) and (len(services) > 1 or "<<" in services):
        raise TaskRejected(
            f"docker-compose.yaml has the services {', '.join(map(str, services))}; several "
            "containers are not supported"
        )


def _seconds(config: Mapping[str, Any], name: str, default: float) -> float:
    value = config.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TaskRejected(f"{name} is {value!r}; it must be a number of seconds")
    if not math.isfinite(value) or not 0 < value <= 7 * 86_400:
        raise TaskRejected(f"{name} is {value!r}; it must be above 0, a week at most")
    return float(value)
