"""Read rows as NeMo Gym holds them: a request to the Responses API, and fields of its verifier.

`responses_create_params` is the prompt; what verifies an answer is a resources server, named by
the file's folder, by `agent_ref`, or by whoever imports. Rows whose verifier is code of NeMo Gym's
own are refused with that reason, unless an evaluator is named for them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rollouts.importers.base import FileContent, TaskRecord, TaskRejected
from rollouts.importers.checks import as_text, content_ref, find, make_record
from rollouts.importers.nemo_gym_verifiers import choose_scoring
from rollouts.importers.options import ReadOptions
from rollouts.importers.prompts import read_prompt
from rollouts.importers.swe import docker_reference, is_swe, read_swe_row, solution_files

PARAMS = "responses_create_params"
_SERVER_IN_PATH = re.compile(r"(?:resources_servers|environments|benchmarks)/([^/]+)/")
_AGENT_SUFFIX = re.compile(r"(_simple)?_agent$")
_REFS = (
    *("instance_id", "uuid", "id", "task_id", "question_id", "example_id", "problem_id"),
    *("hash_id", "hashid", "sample_id", "scenario_id", "name", "task_name"),
    *("verifier_metadata.task_id", "verifier_metadata.id", "verifier_metadata.case_id"),
)


def is_nemo_gym(row: Mapping[str, Any]) -> bool:
    """Tell whether a row looks like one of NeMo Gym's."""
    return PARAMS in row


def server_of(place: str) -> str:
    """Return the resources server that a path tells, empty where it tells none."""
    found = _SERVER_IN_PATH.search(place)
    return found[1] if found else ""


def read_nemo_gym_row(row: Mapping[str, Any], options: ReadOptions) -> TaskRecord:
    """Read one row; raise `TaskRejected`."""
    params = row.get(PARAMS)
    if "response" in row or "reward" in row:
        raise TaskRejected("the row is a finished rollout with its reward, not a task")
    if not isinstance(params, Mapping):
        raise TaskRejected(f"the row has no {PARAMS}: it is no task of NeMo Gym's")
    _refuse_tools(params, options)
    if as_text(row.get("test_sh")) and as_text(row.get("grade_py")):
        return _delivered(row)
    if is_swe(row):
        return read_swe_row(row, options)
    server = options.verifier or _named_server(row)
    scoring, used = choose_scoring(row, server, options)
    instruction, messages = read_prompt(params.get("input"), f"{PARAMS}.input")
    if as_text(params.get("instructions")):
        raise TaskRejected(f"{PARAMS}.instructions stands beside input; move it into the input")
    rest = {name: value for name, value in params.items() if name != "input" and value is not None}
    kept = {name: each for name, each in row.items() if name not in {*used, PARAMS}}
    return make_record(
        ref=_ref(row),
        instruction=instruction,
        messages=messages,
        evaluator=scoring.evaluator,
        settings=scoring.settings,
        payload=scoring.payload,
        metadata={"resources_server": server} if server else {},
        source={**kept, **({PARAMS: rest} if rest else {})},
        environment={"agent": "single_turn"},
    )


def _named_server(row: Mapping[str, Any]) -> str:
    agent = as_text(find(row, "agent_ref.name")) or as_text(row.get("task_source"))
    return _AGENT_SUFFIX.sub("", agent)


def _refuse_tools(params: Mapping[str, Any], options: ReadOptions) -> None:
    tools = params.get("tools") or []
    if not tools or options.tools == "environment":
        return
    names = [as_text(tool.get("name")) for tool in tools if isinstance(tool, Mapping)]
    raise TaskRejected(
        f"the row brings tools that its own server carries out ({', '.join(names[:5])}); choose "
        "an environment whose tools do the same, and say tools = environment"
    )


def _ref(row: Mapping[str, Any]) -> str:
    found = next((as_text(find(row, name)) for name in _REFS if as_text(find(row, name))), "")
    return found if found and len(found) <= 200 else content_ref(row)


def _delivered(row: Mapping[str, Any]) -> TaskRecord:
    """Return a repair that brings its own test script, grader and image: Harbor's contract."""
    workdir = as_text(row.get("workdir")) or "/testbed"
    texts = {
        "test.sh": as_text(row.get("test_sh")),
        "grade.py": as_text(row.get("grade_py")),
        "config.json": as_text(row.get("config_json")),
        "test.patch": as_text(row.get("test_patch")),
    }
    instruction, messages = read_prompt(
        find(row, f"{PARAMS}.input") or as_text(row.get("problem_statement")), f"{PARAMS}.input"
    )
    image = as_text(row.get("image_ref"))
    if not image:
        raise TaskRejected("image_ref is missing: nothing says where the repository is")
    used = {PARAMS, "test_sh", "grade_py", "config_json", "test_patch", "patch", "workdir"}
    return make_record(
        ref=_ref(row),
        instruction=instruction,
        messages=messages,
        tests={
            name: FileContent(data=text.encode(), mode=0o755 if name.endswith(".sh") else 0o644)
            for name, text in texts.items()
            if text
        },
        solution=solution_files(as_text(row.get("patch")), workdir),
        evaluator="script",
        settings={},
        payload={},
        source={name: each for name, each in row.items() if name not in used and each},
        image=docker_reference(image),
        environment={"agent": "bash_block", "workdir": workdir},
        agent_timeout_seconds=_seconds(row, "agent_timeout_sec"),
        verifier_timeout_seconds=_seconds(row, "verifier_timeout_sec"),
    )


def _seconds(row: Mapping[str, Any], name: str) -> float:
    value = row.get(name)
    return float(value) if isinstance(value, int | float) and 0 < value <= 7 * 86_400 else 1800.0
