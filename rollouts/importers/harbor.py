"""Read tasks in the Harbor directory layout (`task.toml` schema 1.x).

A task's `environment/` folder is put under `/setup` of a fresh sandbox and
`environment/setup.sh`, if there, is run once as root. Without one, and without an image of its
own, a Dockerfile becomes a definition that an image is built from. What a task asks for and this
service cannot give is a rejection with a reason, never a task that silently means something else.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from evaluators.base import EvaluatorFault
from evaluators.registry import get_evaluator
from rollouts.importers.base import RejectedTask, TaskRecord, TaskRejected, json_copy
from rollouts.importers.folder import decode_text, read_files, read_text
from rollouts.importers.harbor_keys import kept_environment, refuse_unknown_keys
from rollouts.importers.surroundings import read_surroundings

EVALUATOR = "script"
DEFAULT_TIMEOUT_SECONDS = 600.0
REF = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?$")
UNSUPPORTED_ENVIRONMENT = {
    "gpus": "GPUs are given by a catalogue's environment: remove it, and import with one",
    "gpu_types": "GPUs are given by a catalogue's environment: remove it, and import with one",
    "tpu": "no sandbox here has one; remove it",
    "mcp_servers": "MCP servers belong to an environment's tools: remove it, and import with one",
    "skills_dir": "agents here read no skills; put them into the instruction",
    "healthcheck": "nothing is started that could be waited for; let setup.sh wait for it",
}
STEPS = (
    "the task has several steps, which are not supported: one sandbox is graded once here; split "
    "it into tasks whose setup brings each step's beginning about"
)


def read_harbor_folder(path: Path) -> Iterator[TaskRecord | RejectedTask]:
    """Read every task folder in a folder, in name order; a bad task never hides the others.

    Hidden entries and plain files beside the task folders are passed over. Raises
    `NotADirectoryError` when `path` is no folder.
    """
    return read_task_folders(path, read_harbor_task)


def read_task_folders(
    path: Path, read_one: Callable[[Path], TaskRecord]
) -> Iterator[TaskRecord | RejectedTask]:
    """Read every folder of a folder with `read_one`, in name order."""
    seen: dict[str, Path] = {}
    for folder in sorted(path.iterdir()):
        if folder.name.startswith(".") or not folder.is_dir():
            continue
        if folder.is_symlink():
            yield RejectedTask(
                path=folder, reason="a link to a folder; put the folder itself there"
            )
            continue
        try:
            record = read_one(folder)
        except TaskRejected as error:
            yield RejectedTask(path=folder, reason=str(error))
            continue
        if record.ref in seen:
            reason = f"the name {record.ref!r} is taken by {seen[record.ref].name}; choose another"
            yield RejectedTask(path=folder, reason=reason)
            continue
        seen[record.ref] = folder
        yield record


def read_harbor_task(path: Path) -> TaskRecord:
    """Read one task folder; raise `TaskRejected` with what to do about it."""
    if not path.is_dir():
        raise TaskRejected(f"{path} is not a folder")
    config = _read_toml(path)
    refuse_unknown_keys(config)
    instruction = read_text(path / "instruction.md", inside=path)
    if not instruction.strip():
        raise TaskRejected("instruction.md is empty; say in it what is to be done")
    if (path / "steps").exists() or config.get("steps"):
        raise TaskRejected(STEPS)
    environment = _table(config, "environment")
    kept = kept_environment(environment)
    agent, verifier = _table(config, "agent"), _table(config, "verifier")
    _refuse_unsupported(path, environment, agent, verifier)
    made = read_surroundings(
        path, image=_text(environment, "docker_image"), workdir=_text(environment, "workdir")
    )
    tests = read_files(path / "tests", inside=path)
    if "test.sh" not in tests:
        raise TaskRejected("tests/test.sh is missing; add the script that writes the reward")
    decode_text(tests["test.sh"].data, "tests/test.sh")
    metadata = dict(_table(config, "metadata"))
    settings = _evaluator_settings(metadata.pop("evaluator", {}))
    if made.ignored:
        metadata["dockerfile_ignored"] = list(made.ignored)
    if _table(config, "solution").get("env"):
        metadata["solution_env_ignored"] = sorted(_table(_table(config, "solution"), "env"))
    if made.workdir:
        kept["workdir"] = made.workdir
    for name, env in (("env", kept.get("env", {})), ("verifier_env", verifier.get("env", {}))):
        _check_env(name, env)
    if made.env:
        kept["env"] = {**made.env, **kept.get("env", {})}
    return TaskRecord(
        ref=_ref(path, _table(config, "task")),
        instruction=instruction,
        setup=made.setup,
        files=made.files,
        tests=tests,
        solution=read_files(path / "solution", inside=path),
        agent_timeout_seconds=_seconds(agent, "agent"),
        verifier_timeout_seconds=_seconds(verifier, "verifier"),
        image=made.image,
        build=made.build,
        environment=json_copy(kept, "[environment]"),
        evaluator=EVALUATOR,
        evaluator_settings=settings,
        evaluator_payload=_payload(config, verifier),
        metadata=json_copy(metadata, "[metadata]"),
    )


def _read_toml(path: Path) -> Mapping[str, Any]:
    try:
        config = tomllib.loads(read_text(path / "task.toml", inside=path))
    except tomllib.TOMLDecodeError as error:
        raise TaskRejected(f"task.toml is not TOML: {error}; mend it") from error
    version = config.get("schema_version", config.get("version", "1.0"))
    if not isinstance(version, str) or not re.fullmatch(r"1(\.\d+)?", version):
        raise TaskRejected(f"task.toml has schema_version {version!r}; 1.0 to 1.4 can be read")
    return config


def _refuse_unsupported(
    path: Path,
    environment: Mapping[str, Any],
    agent: Mapping[str, Any],
    verifier: Mapping[str, Any],
) -> None:
    for name in ("docker-compose.yaml", "docker-compose.yml"):
        if (path / "environment" / name).exists():
            raise TaskRejected(f"environment/{name}: several containers are not supported")
    for name, why in UNSUPPORTED_ENVIRONMENT.items():
        if environment.get(name):
            raise TaskRejected(f"[environment] {name} is not supported: {why}")
    if environment.get("os", "linux") != "linux":
        raise TaskRejected(f"[environment] os is {environment['os']!r}; only linux is supported")
    if verifier.get("environment_mode", "shared") != "shared" or verifier.get("environment"):
        raise TaskRejected("[verifier] environment_mode is not supported other than 'shared'")
    for name, table in (("agent", agent), ("verifier", verifier)):
        if table.get("user") not in (None, "", "root", 0, "0"):
            raise TaskRejected(f"[{name}] user is {table['user']!r}; only root is supported")
        if table.get("network_mode") not in (None, "", "no-network", "none"):
            raise TaskRejected(f"[{name}] network_mode is of one part only; set [environment]'s")
    if verifier.get("collect"):
        raise TaskRejected("[verifier] collect is not supported; name the files under artifacts")


def _payload(config: Mapping[str, Any], verifier: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what the grading has to know beside the tests: their variables, what is kept."""
    artifacts = config.get("artifacts", [])
    if not isinstance(artifacts, list) or not all(isinstance(each, str) for each in artifacts):
        raise TaskRejected("task.toml: artifacts must be a list of paths")
    for each in artifacts:
        if not each.startswith("/") or ".." in Path(each).parts:
            raise TaskRejected(f"task.toml: the artifact {each!r} must be a path from the root")
    payload: dict[str, Any] = {}
    if verifier.get("env"):
        payload["verifier_env"] = verifier["env"]
    if artifacts:
        payload["artifacts"] = artifacts
    return json_copy(payload, "task.toml")


def _evaluator_settings(settings: Any) -> Mapping[str, Any]:
    if not isinstance(settings, dict):
        raise TaskRejected("[metadata.evaluator] must be a table")
    try:
        get_evaluator(EVALUATOR).validate(settings, {})
    except EvaluatorFault as fault:
        raise TaskRejected(f"[metadata.evaluator] {fault}") from fault
    return json_copy(settings, "[metadata.evaluator]")


def _ref(path: Path, task: Mapping[str, Any]) -> str:
    return check_ref_form(_text(task, "name") or path.resolve().name)


def check_ref_form(ref: str) -> str:
    """Return a task's name when it can be one; raise `TaskRejected`."""
    if not REF.match(ref) or len(ref) > 200:
        raise TaskRejected(
            f"the name {ref!r} must be letters, digits, '.', '_' and '-', with one '/' at most"
        )
    return ref


def _seconds(table: Mapping[str, Any], name: str) -> float:
    value = table.get("timeout_sec", DEFAULT_TIMEOUT_SECONDS)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TaskRejected(f"[{name}] timeout_sec is {value!r}; it must be a number of seconds")
    if not math.isfinite(value) or not 0 < value <= 7 * 86_400:
        raise TaskRejected(f"[{name}] timeout_sec is {value!r}; it must be above 0, a week at most")
    return float(value)


def _check_env(name: str, env: Any) -> None:
    if not isinstance(env, dict):
        raise TaskRejected(f"{name} must be a table of texts")
    for key, value in env.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", key):
            raise TaskRejected(f"{name} has {key!r}, which is no name of a variable")
        if not isinstance(value, str):
            raise TaskRejected(f"{name}.{key} is {value!r}; it must be a text")
        if "${" in value:
            raise TaskRejected(
                f"{name}.{key} takes a variable of the host, which tasks never see; write a value"
            )


def _table(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = config.get(name, {})
    if not isinstance(value, dict):
        raise TaskRejected(f"task.toml: [{name}] must be a table")
    return value


def _text(table: Mapping[str, Any], name: str) -> str | None:
    value = table.get(name)
    if value is not None and not isinstance(value, str):
        raise TaskRejected(f"task.toml: {name} is {value!r}; it must be a text")
    return value or None
