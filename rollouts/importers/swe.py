"""Read rows of repository repairs: SWE-bench and the data sets that follow it.

SWE-bench, SWE-Gym, SWE-smith, SWE-rebench, R2E-Gym, SWE-Next, Scale-SWE, SWE-bench Pro and
NeMo Gym's copies of them. A row says which repository at which commit, what is wrong, and which
tests tell; what else a grading needs is taken from where each data set keeps it.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Mapping
from typing import Any

from rollouts.importers.base import FileContent, TaskRecord, TaskRejected
from rollouts.importers.checks import as_text, content_ref, find, make_record
from rollouts.importers.evaluator_choice import as_json
from rollouts.importers.options import ReadOptions
from rollouts.importers.prompts import read_prompt
from rollouts.importers.swe_commands import command_of, log_parser_of

DEFAULT_WORKDIR = "/testbed"
SETUP_SECONDS = 1800.0
SCALE_TEST = "test_fail_to_pass.py"  # what Scale-SWE calls a test that it wrote itself
_IMAGE_COLUMNS = ("image", "docker_image", "image_name", "image_ref", "image_url", "image_uri")
_PATCHED = re.compile(r"^diff --git a/(\S+) b/(\S+)$", re.MULTILINE)
_PLACE = re.compile(r"\{([A-Za-z_][A-Za-z0-9_.]*)\}")
_HIDDEN = frozenset({"responses_create_params", "test_patch", "f2p_patch", "patch"})
_TOLD = ("repo", "version", "language", "difficulty", "subset", "split", "created_at")


def is_swe(row: Mapping[str, Any]) -> bool:
    """Tell whether a row looks like a repository repair."""
    tested = {"FAIL_TO_PASS", "fail_to_pass", "expected_output_json", "passed_ptp"} & set(row)
    return bool(tested) and ("problem_statement" in row or "prompt" in row)


def read_swe_row(row: Mapping[str, Any], options: ReadOptions) -> TaskRecord:
    """Read one row; raise `TaskRejected`."""
    instance = _instance(row)
    workdir = options.workdir or as_text(row.get("workdir")) or _default_workdir(row)
    test_patch = as_text(row.get("test_patch")) or as_text(row.get("f2p_patch"))
    commit = _base_commit(row)
    payload: dict[str, Any] = {
        "instance_id": instance,
        "repo": as_text(row.get("repo")) or as_text(row.get("repo_name")),
        "version": as_text(row.get("version")),
        **({"base_commit": commit} if commit else {}),
        "test_patch": test_patch,
        "fail_to_pass": _tests(row, "FAIL_TO_PASS", "fail_to_pass"),
        "pass_to_pass": _tests(row, "PASS_TO_PASS", "pass_to_pass"),
        "workdir": workdir,
    }
    if not payload["fail_to_pass"] and "passed_ptp" in row:  # written from nothing: all must pass
        payload["fail_to_pass"] = _tests(row, "passed_ptp", "passed_ptp")
    named = [*payload["fail_to_pass"], *payload["pass_to_pass"]]
    if as_text(row.get("f2p_script")) and any(name.startswith(SCALE_TEST) for name in named):
        payload["test_files"] = {SCALE_TEST: as_text(row["f2p_script"])}
    payload |= _grading(row, patched_files(test_patch), named, options)
    if not payload["fail_to_pass"] and "expected" not in payload:
        raise TaskRejected("no test of FAIL_TO_PASS tells a repair from none; add at least one")
    if as_text(row.get("test_binary_archive_b64")):
        raise TaskRejected("the tests are a binary archive, which cannot be laid into a repository")
    instruction, messages = _instruction(row)
    used = {"FAIL_TO_PASS", "PASS_TO_PASS", "fail_to_pass", "pass_to_pass", "problem_statement"}
    used |= {*_HIDDEN, "instance_id", "base_commit", "workdir", "repo", *_IMAGE_COLUMNS}
    used |= {"run_script", "parser_script", "expected_output_json", "f2p_script"}
    return make_record(
        ref=instance,
        instruction=instruction,
        messages=messages,
        setup=as_text(row.get("pre_commands")) and _setup(workdir, as_text(row["pre_commands"])),
        evaluator="swe",
        settings={},
        payload=payload,
        metadata={name: row[name] for name in _TOLD if row.get(name)},
        source={name: each for name, each in row.items() if name not in used and each},
        solution=solution_files(as_text(row.get("patch")), workdir),
        image=_image(row, instance, options),
        environment={"agent": "bash_block", "workdir": workdir},
        agent_timeout_seconds=SETUP_SECONDS,
        verifier_timeout_seconds=SETUP_SECONDS,
    )


def solution_files(patch: str, workdir: str) -> dict[str, FileContent]:
    """Return the reference solution as files: the patch, and the script that applies it."""
    if not patch:
        return {}
    script = f"#!/bin/bash\nset -e\ncd {shlex.quote(workdir)}\ngit apply /solution/patch.diff\n"
    return {
        "patch.diff": FileContent(data=patch.encode()),
        "solve.sh": FileContent(data=script.encode(), mode=0o755),
    }


def patched_files(patch: str) -> list[str]:
    """Return the files that a patch leaves, in its order."""
    return list(dict.fromkeys(after for _before, after in _PATCHED.findall(patch)))


def _grading(
    row: Mapping[str, Any], files: list[str], named: list[str], options: ReadOptions
) -> dict[str, Any]:
    """Return how the tests are run and their log is read."""
    if row.get("run_script"):  # SWE-bench Pro brings both
        selected = _tests(row, "selected_test_files_to_run", "selected_test_files_to_run")
        prepare = as_text(row.get("before_repo_set_cmd"))
        return {
            "run_script": as_text(row["run_script"]),
            "parser_script": as_text(row.get("parser_script")),
            "selected_test_files_to_run": selected,
            **({"before_tests": prepare} if prepare else {}),
        }
    if row.get("expected_output_json"):  # R2E-Gym and SWE-Next
        expected = as_json(row["expected_output_json"], "expected_output_json")
        if not isinstance(expected, Mapping) or not expected:
            raise TaskRejected("expected_output_json must be an object of tests and their outcomes")
        command = options.test_cmd or as_text(row.get("test_cmd")) or "bash run_tests.sh"
        return {
            "expected": dict(expected),
            "test_cmd": command,
            "log_parser": options.log_parser or "r2e",
            # R2E-Gym wants that very map; SWE-Next, which lists tests too, that they passed.
            "mode": "expected_passed" if named else "exact_map",
        }
    if as_text(row.get("eval_script")):
        parser = options.log_parser or as_text(row.get("log_parser")) or log_parser_of(row)
        return {"eval_script": as_text(row["eval_script"]), "log_parser": parser}
    command = options.test_cmd or command_of(row, files, named)
    parser = options.log_parser or log_parser_of(row)
    return {"test_cmd": command, "log_parser": parser}


def _instance(row: Mapping[str, Any]) -> str:
    name = as_text(row.get("instance_id"))
    if name:
        return name
    repo, commit = as_text(row.get("repo_name")), as_text(row.get("commit_hash"))
    return f"{repo}-{commit}" if repo and commit else content_ref(row)


def _default_workdir(row: Mapping[str, Any]) -> str:
    return "/app" if row.get("run_script") else DEFAULT_WORKDIR


def _base_commit(row: Mapping[str, Any]) -> str:
    """Return the commit that the task begins at; empty: that of the image."""
    commit = as_text(row.get("base_commit"))
    return "" if commit == "HEAD" else commit


def _tests(row: Mapping[str, Any], *columns: str) -> list[str]:
    """Return a list of tests, which some data sets hold as the text of a list."""
    value: Any = next((row[name] for name in columns if row.get(name) is not None), [])
    if isinstance(value, str):
        value = _list_in(value)
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise TaskRejected(f"{columns[0]} must be a list of tests, or the JSON text of one")
    return value


def _list_in(text: str) -> Any:
    if not text.strip():
        return []
    for read in (json.loads, ast.literal_eval):
        try:
            return read(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
    return None


def _instruction(row: Mapping[str, Any]) -> tuple[str, Any]:
    given = find(row, "responses_create_params.input")
    if given:
        return read_prompt(given, "responses_create_params.input")
    text = as_text(row.get("problem_statement")) or as_text(row.get("prompt"))
    if not text.strip():
        raise TaskRejected("problem_statement is empty; a task needs an instruction")
    extra = [
        f"{title}:\n{as_text(row.get(name))}"
        for title, name in (("Requirements", "requirements"), ("New interfaces", "interface"))
        if as_text(row.get(name))
    ]
    return "\n\n".join([text, *extra]), ()


def _image(row: Mapping[str, Any], instance: str, options: ReadOptions) -> str:
    if options.image:
        return _PLACE.sub(lambda place: as_text(find(row, place[1])), options.image)
    for name in _IMAGE_COLUMNS:
        if as_text(row.get(name)):
            return docker_reference(as_text(row[name]))
    if as_text(row.get("dockerhub_tag")):
        return docker_reference(f"jefzda/sweap-images:{as_text(row['dockerhub_tag'])}")
    if "environment_setup_commit" in row:  # SWE-bench itself
        name = instance.lower().replace("__", "_1776_")
        return docker_reference(f"swebench/sweb.eval.x86_64.{name}:latest")
    if "hints_text" in row:  # SWE-Gym, which has no such column
        name = instance.lower().replace("__", "_s_")
        return docker_reference(f"xingyaoww/sweb.eval.x86_64.{name}:latest")
    raise TaskRejected(
        "nothing says which image the repository is in; give one for all rows, such as "
        'image = "docker://registry.example.org/{instance_id}"'
    )


def docker_reference(name: str) -> str:
    """Return an image's name as a source that nodes pull."""
    return name if "://" in name else f"docker://{name}"


def _setup(workdir: str, commands: str) -> str:
    return f"set -e\ncd {shlex.quote(workdir)}\n{commands}\n"
