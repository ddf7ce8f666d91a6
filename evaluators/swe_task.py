"""Read what a SWE-style task says: one frozen value from settings and hidden payload."""

from __future__ import annotations

import ast
import hashlib
import json
import posixpath
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from evaluators.base import InvalidSettings, JsonMap
from evaluators.parsers.registry import check_parser
from evaluators.scope import read_network
from evaluators.settings import finite, read_choice, refuse_unknown
from evaluators.swe_patch import paths_of

MODES = ("tests", "exact_map", "expected_passed")
EVAL_TYPES = ("pass_and_fail", "fail_only")
REPORTS = ("auto", "always", "never")
EXIT_CODES = ("check", "ignore")
REWARDS = ("resolved", "fail_to_pass")
# Files that decide how tests are collected and reported, not how the program works.
PROTECTED = (
    "**/conftest.py",
    "**/sitecustomize.py",
    "**/usercustomize.py",
    "pytest.ini",
    ".pytest.ini",
    "tox.ini",
)
DEFAULTS = frozenset(
    {"workdir", "test_cmd", "install", "before_tests", "log_parser", "eval_type", "mode"}
)
SETTINGS = DEFAULTS | {
    "protect",
    "report",
    "exit_code",
    "reward",
    "patch_bytes",
    "log_bytes",
    "patch_seconds",
    "test_seconds",
    "network",
}
MAX_TESTS = 200_000
MAX_FILES = 1_000
# By its own name a file of tests: a doctest is named by the file of the program that it is in.
_TEST_FILE = re.compile(r"(?:[\w.-]+/)*(?:test_[\w.-]+|tests?|[\w.-]+(?:_test|\.test|\.spec))\.\w+")
_REVISION = re.compile(r"[0-9A-Za-z][0-9A-Za-z._/~^-]{0,199}")


@dataclass(frozen=True, kw_only=True)
class SweTask:
    """Say how one task's patch is taken and its tests are run; fields as in `evaluators.swe`."""

    instance_id: str
    repo: str
    version: str
    workdir: str
    base_commit: str
    test_patch: str
    test_files: Mapping[str, str]
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]
    expected: Mapping[str, str]
    mode: str
    eval_type: str
    log_parser: str
    script: str
    applies_test_patch: bool
    before_tests: str
    run_script: str
    parser_script: str
    selected: str
    protect: tuple[str, ...]
    report: str
    checks_exit_code: bool
    reward: str
    patch_bytes: int
    log_bytes: int
    patch_seconds: float
    test_seconds: float | None
    network: bool
    secret: str

    @property
    def restored(self) -> tuple[str, ...]:
        """Return the paths that are as the tests have them, whatever the agent did to them.

        Those that the tests bring, the files of tests that are named by file (`a/b.py::test`), and
        the `__init__.py` that makes a folder of tests a package.
        """
        named = (name.split("::")[0] for name in (*self.fail_to_pass, *self.pass_to_pass))
        files = (path for path in named if _TEST_FILE.fullmatch(path) and ".." not in path)
        brought = dict.fromkeys((*paths_of(self.test_patch), *self.test_files, *files))
        packages = (
            posixpath.join(folder, "__init__.py")
            for folder in dict.fromkeys(map(posixpath.dirname, brought))
            if any(part.startswith("test") for part in folder.split("/"))
        )
        return tuple(dict.fromkeys((*brought, *packages)))


def read_task(settings: JsonMap, payload: JsonMap) -> SweTask:
    """Return the task; raise `InvalidSettings` that names the first wrong field."""
    refuse_unknown(settings, SETTINGS, evaluator="swe")
    said: dict[str, Any] = {name: settings[name] for name in DEFAULTS & set(settings)}
    said |= {name.lower(): value for name, value in payload.items() if value is not None}
    expected = _expected(said.get("expected"))
    lists = {name: _names(said, name) for name in ("fail_to_pass", "pass_to_pass")}
    default_mode = "exact_map" if expected and not any(lists.values()) else "tests"
    mode = read_choice(said, "mode", default_mode, MODES)
    _check_graded(mode, lists, expected)
    test_patch = _text(said, "test_patch")
    run_script, parser_script = _text(said, "run_script"), _text(said, "parser_script")
    eval_script = _text(said, "eval_script")
    install, command = _commands(said, "install"), _commands(said, "test_cmd")
    _check_command(eval_script, command, run_script, parser_script)
    before = [install, _commands(said, "before_tests")]
    parser = "" if run_script else _text(said, "log_parser")
    if not run_script:
        check_parser(parser)
    return SweTask(
        instance_id=_text(said, "instance_id"),
        repo=_text(said, "repo"),
        version=_text(said, "version"),
        workdir=_workdir(said.get("workdir", "/testbed")),
        base_commit=_revision(said.get("base_commit", "")),
        test_patch=test_patch,
        test_files=_files(said.get("test_files", {})),
        fail_to_pass=lists["fail_to_pass"],
        pass_to_pass=lists["pass_to_pass"],
        expected=expected,
        mode=mode,
        eval_type=read_choice(said, "eval_type", "pass_and_fail", EVAL_TYPES),
        log_parser=parser,
        script=eval_script or command.replace("{test_files}", _quoted(paths_of(test_patch))),
        applies_test_patch=not eval_script or _flag(said, "apply_test_patch"),
        before_tests="\n".join(part for part in before if part),
        run_script=run_script,
        parser_script=parser_script,
        selected=",".join(_names(said, "selected_test_files_to_run")),
        protect=_patterns(settings.get("protect", list(PROTECTED))),
        report=read_choice(settings, "report", "auto", REPORTS),
        checks_exit_code=read_choice(settings, "exit_code", "check", EXIT_CODES) == "check",
        reward=read_choice(settings, "reward", "resolved", REWARDS),
        patch_bytes=_count(settings, "patch_bytes", 10_000_000, 15_000_000),
        log_bytes=_count(settings, "log_bytes", 8_000_000, 64_000_000),
        patch_seconds=_seconds(settings, "patch_seconds") or 300.0,
        test_seconds=_seconds(settings, "test_seconds"),
        network=read_network(settings),
        secret=hashlib.sha256(json.dumps(dict(payload), sort_keys=True).encode()).hexdigest(),
    )


def _check_graded(
    mode: str, lists: Mapping[str, tuple[str, ...]], expected: Mapping[str, str]
) -> None:
    if mode == "tests" and not any(lists.values()):
        raise InvalidSettings(
            "swe: the payload has neither 'fail_to_pass' nor 'pass_to_pass' tests, so nothing "
            "could be graded; give at least one, or 'expected' with mode 'exact_map'"
        )
    if mode != "tests" and not expected:
        raise InvalidSettings(f"swe: mode {mode!r} needs 'expected', a map of test to status")


def _check_command(eval_script: str, command: str, run_script: str, parser_script: str) -> None:
    given = [
        name
        for name, text in (
            ("eval_script", eval_script),
            ("test_cmd", command),
            ("run_script", run_script),
        )
        if text.strip()
    ]
    if not given:
        raise InvalidSettings(
            "swe: nothing says how the tests are run; give 'test_cmd', 'eval_script' or "
            "'run_script' in the payload, or 'test_cmd' in the settings, where {test_files} stands "
            "for the files that test_patch touches"
        )
    if bool(run_script) != bool(parser_script):
        raise InvalidSettings("swe: 'run_script' and 'parser_script' go together")


def _text(said: JsonMap, name: str) -> str:
    value = said.get(name, "")
    if not isinstance(value, str) or "\0" in value:
        raise InvalidSettings(f"swe: {name!r} is {str(value)[:80]!r}; it must be text")
    return value


def _flag(said: JsonMap, name: str) -> bool:
    value = said.get(name, False)
    if not isinstance(value, bool):
        raise InvalidSettings(f"swe: {name!r} is {value!r}; it must be true or false")
    return value


def _commands(said: JsonMap, name: str) -> str:
    """Return shell text; a list is one command a line."""
    value = said.get(name, "")
    lines = [value] if isinstance(value, str) else value
    if not isinstance(lines, list) or not all(
        isinstance(line, str) and "\0" not in line for line in lines
    ):
        raise InvalidSettings(f"swe: {name!r} must be a command or a list of commands")
    return "\n".join(line for line in lines if line.strip())


def _names(said: JsonMap, name: str) -> tuple[str, ...]:
    """Return test names: a list, or the JSON or Python text of one, as data sets ship them."""
    value = said.get(name, [])
    if isinstance(value, str):
        value = _read_list(name, value) if value.strip() else []
    is_list = isinstance(value, list) and all(isinstance(each, str) for each in value)
    if not is_list or len(value) > MAX_TESTS:
        raise InvalidSettings(f"swe: {name!r} must be a list of at most {MAX_TESTS} test names")
    return tuple(dict.fromkeys(value))


def _read_list(name: str, text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
        raise InvalidSettings(f"swe: {name!r} is text, but no JSON list of names") from error


def _expected(value: object) -> dict[str, str]:
    if isinstance(value, str):
        try:
            value = json.loads(value or "{}")
        except (ValueError, RecursionError) as error:
            raise InvalidSettings("swe: 'expected' is text, but no JSON map") from error
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(
        isinstance(status, str) for status in value.values()
    ):
        raise InvalidSettings("swe: 'expected' must map test names to statuses such as PASSED")
    return {str(name): str(status) for name, status in value.items()}


def _files(value: object) -> dict[str, str]:
    if not isinstance(value, Mapping) or len(value) > MAX_FILES:
        raise InvalidSettings(f"swe: 'test_files' must map at most {MAX_FILES} paths to texts")
    files: dict[str, str] = {}
    for path, text in value.items():
        parts = path.split("/") if isinstance(path, str) else [".."]
        if not path or path.startswith("/") or {"..", ".git"} & set(parts) or "\0" in path:
            raise InvalidSettings(f"swe: 'test_files' holds {path!r:.200}, no path inside the repo")
        if not isinstance(text, str):
            raise InvalidSettings(f"swe: 'test_files' holds no text for {path!r:.200}")
        files[posixpath.normpath(path)] = text
    return files


def _patterns(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(
        isinstance(each, str) and each and "\0" not in each for each in value
    ):
        raise InvalidSettings(
            "setting 'protect' must be a list of patterns such as \"**/conftest.py\"; [] for none"
        )
    return tuple(value)


def _workdir(value: object) -> str:
    if not isinstance(value, str) or not value.startswith("/") or "\0" in value:
        raise InvalidSettings(f"swe: 'workdir' is {value!r:.200}; it must be an absolute path")
    return "/" + posixpath.normpath(value).strip("/")


def _revision(value: object) -> str:
    if value == "":
        return ""
    if not isinstance(value, str) or not _REVISION.fullmatch(value):
        raise InvalidSettings(f"swe: 'base_commit' is {value!r:.200}; it must name a commit")
    return value


def _count(settings: JsonMap, name: str, default: int, most: int) -> int:
    value = finite(settings.get(name, default), f"setting {name!r}")
    if value != int(value) or not 1 <= value <= most:
        raise InvalidSettings(f"setting {name!r} is {value:g}; it must be from 1 to {most}")
    return int(value)


def _seconds(settings: JsonMap, name: str) -> float | None:
    if settings.get(name) is None:
        return None
    value = finite(settings[name], f"setting {name!r}")
    if value <= 0:
        raise InvalidSettings(f"setting {name!r} is {value:g}; it must be above 0")
    return value


def _quoted(paths: tuple[str, ...]) -> str:
    return " ".join(shlex.quote(path) for path in paths)
