"""How the tests of a repository are run, by where a data set says it."""

from __future__ import annotations

from typing import Any

import pytest

from rollouts.importers.swe_commands import ACTIVATE, command_of

FILES = ["tests/test_a.py", "tests/data.json", "tests/test b.py"]


@pytest.mark.parametrize(
    ("row", "command"),
    [
        (
            {"install_config": {"test_cmd": "pytest -rA"}},
            f"{ACTIVATE}; pytest -rA tests/test_a.py 'tests/test b.py'",
        ),
        (
            {"install_config": {"test_cmd": ["make", "pytest -rA"]}, "language": "Python"},
            f"{ACTIVATE}; make\npytest -rA tests/test_a.py 'tests/test b.py'",
        ),
        ({"install_config": {"test_cmd": "npm test"}, "language": "js"}, "npm test"),
        ({"test_cmd": "pytest -x", "install_config": {"test_cmd": "no"}}, "pytest -x"),
        (
            {"test_cmd": [], "repo": "o/r"},
            f"{ACTIVATE}; pytest -rA tests/test_a.py 'tests/test b.py'",
        ),
    ],
)
def test_the_command_is_run_as_its_data_set_does(row: dict[str, Any], command: str) -> None:
    assert command_of(row, FILES, []) == command
