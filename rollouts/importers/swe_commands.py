"""How the repositories of SWE-bench run their tests, and who reads the log.

From swebench 2 (`MAP_REPO_VERSION_TO_SPECS`, `MAP_REPO_TO_PARSER`), which later releases dropped.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from rollouts.importers.base import TaskRejected
from rollouts.importers.checks import as_text, find

PYTEST = "pytest -rA"
_SYMPY = "PYTHONWARNINGS='ignore::UserWarning,ignore::SyntaxWarning' bin/test -C --verbose"
_DJANGO = "./tests/runtests.py --verbosity 2 --settings=test_sqlite --parallel 1"
COMMANDS: Mapping[str, str] = {
    "django/django": _DJANGO,
    "sympy/sympy": _SYMPY,
    "sphinx-doc/sphinx": "tox --current-env -epy39 -v --",
    "mwaskom/seaborn": "pytest --no-header -rA",
    "astropy/astropy": "pytest -rA -vv -o console_output_style=classic --tb=no",
}
PARSERS: Mapping[str, str] = {
    "django/django": "parse_log_django",
    "sympy/sympy": "parse_log_sympy",
    "mwaskom/seaborn": "parse_log_seaborn",
    "matplotlib/matplotlib": "parse_log_matplotlib",
    "astropy/astropy": "parse_log_astropy",
    "scikit-learn/scikit-learn": "parse_log_scikit",
    "sphinx-doc/sphinx": "parse_log_sphinx",
}
ACTIVATE = (
    "if [ -f /opt/miniconda3/bin/activate ]; then . /opt/miniconda3/bin/activate; "
    "conda activate testbed; fi"
)
_NOT_TESTS = re.compile(
    r"\.(json|png|csv|txt|md|jpg|jpeg|pkl|yml|yaml|toml|rst|cfg|ini|html|svg|xml)$"
)


def command_of(row: Mapping[str, Any], files: Sequence[str], named: Sequence[str]) -> str:
    """Return the command that runs a row's tests; raise `TaskRejected` when nothing tells.

    `files` are those that the test patch touches, `named` the tests that have to pass.
    """
    language = as_text(row.get("language")) or "python"
    tests = [name for name in files if not _NOT_TESTS.search(name)]
    for path in ("test_cmd", "test_command", "install_config.test_cmd", "install_config.test_cmds"):
        given = _given_command(find(row, path))
        if given and path.startswith("install_config.") and language.lower() == "python":
            # SWE-rebench runs it as SWE-bench does its own: in `testbed`, on the patched tests.
            return f"{ACTIVATE}; {' '.join([given, *map(shlex.quote, tests)])}"
        if given:
            return given
    repo = as_text(row.get("repo"))
    if repo not in COMMANDS and language.lower() != "python":
        raise TaskRejected(
            f"nothing says how the tests of a {language} repository are run; give test_cmd and "
            "log_parser for all rows"
        )
    if repo not in COMMANDS:  # elsewhere tests of untouched files have to pass as well
        beside = (name.partition("::")[0] for name in named if "::" in name)
        tests = list(dict.fromkeys([*tests, *beside]))
    if not tests:
        raise TaskRejected("test_patch names no test file to run; give test_cmd for all rows")
    if repo == "django/django":
        tests = [_django_label(name) for name in tests]
    words = " ".join(shlex.quote(name) for name in tests)
    return f"{ACTIVATE}; {COMMANDS.get(repo, PYTEST)} {words}"


def _given_command(given: Any) -> str:
    if isinstance(given, list) and all(isinstance(each, str) for each in given):
        return "\n".join(given)  # each is run, whatever the one before it ended with
    return as_text(given)


def log_parser_of(row: Mapping[str, Any]) -> str:
    """Return the name of the parser of a row's test log."""
    for path in ("log_parser", "install_config.log_parser", "test_framework"):
        given = as_text(find(row, path))
        if given:
            return given
    return PARSERS.get(as_text(row.get("repo")), "parse_log_pytest")


def _django_label(path: str) -> str:
    """Return a test file as the label that Django's own runner takes."""
    return path.removesuffix(".py").removeprefix("tests/").replace("/", ".")
