"""Find a log parser by name: our own, those of swebench that we have, those of the package."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from types import MappingProxyType

from evaluators.base import InvalidSettings
from evaluators.parsers import compiled, javascript, pytest_log, unittest_log
from evaluators.parsers.base import Parser, Results, clean
from evaluators.parsers.swebench import PREFIX, is_installed, load_registry, parse_with_swebench

_PYTEST = ("astroid", "flask", "marshmallow", "pvlib", "pyvista", "sqlfluff", "xarray")
_OPTIONS = ("pydicom", "requests", "pylint")
_V2 = ("astropy", "scikit", "sphinx")

PARSERS: Mapping[str, Parser] = MappingProxyType(
    {
        "pytest": pytest_log.parse_pytest,
        "unittest": unittest_log.parse_unittest,
        "django": unittest_log.parse_unittest,
        "r2e": unittest_log.parse_r2e,
        "go": compiled.parse_go,
        "go_json": compiled.parse_go_json,
        "cargo": compiled.parse_cargo,
        "maven": compiled.parse_maven,
        "gradle": compiled.parse_gradle,
        "jest": javascript.parse_jest,
        "vitest": javascript.parse_vitest,
        "mocha": javascript.parse_mocha,
        "parse_log_pytest": pytest_log.parse_log_pytest,
        "parse_log_pytest_options": pytest_log.parse_log_pytest_options,
        "parse_log_pytest_v2": pytest_log.parse_log_pytest_v2,
        **{f"parse_log_{name}": pytest_log.parse_log_pytest for name in _PYTEST},
        **{f"parse_log_{name}": pytest_log.parse_log_pytest_options for name in _OPTIONS},
        **{f"parse_log_{name}": pytest_log.parse_log_pytest_v2 for name in _V2},
        "parse_log_seaborn": pytest_log.parse_log_seaborn,
        "parse_log_matplotlib": pytest_log.parse_log_matplotlib,
        "parse_log_django": unittest_log.parse_log_django,
        "parse_log_sympy": unittest_log.parse_log_sympy,
        "parse_log_gotest": compiled.parse_log_gotest,
        "parse_log_cargo": compiled.parse_log_cargo,
        "parse_log_maven": compiled.parse_log_maven,
        "parse_log_gradle_custom": compiled.parse_log_gradle_custom,
        "parse_log_ant": compiled.parse_log_ant,
        "parse_log_jest": javascript.parse_log_jest,
        "parse_log_jest_json": javascript.parse_log_jest_json,
        "parse_log_vitest": javascript.parse_log_vitest,
        "parse_log_tap": javascript.parse_log_tap,
        "parse_log_carbon": javascript.parse_log_carbon,
        "parse_log_react_pdf": javascript.parse_log_carbon,
    }
)
# Parsers that read pytest's results, which a report file tells better than a log.
OF_PYTEST = frozenset(
    name
    for name, parser in PARSERS.items()
    if parser.__module__ == pytest_log.__name__ or name == "r2e"
)


def check_parser(name: str) -> None:
    """Raise `InvalidSettings` that says what to do when there is no parser of that name here."""
    if not name:
        raise InvalidSettings(
            f"setting 'log_parser' is missing; known are {', '.join(sorted(PARSERS))}"
        )
    if name in PARSERS:
        return
    theirs = name.removeprefix(PREFIX)
    if name.startswith(PREFIX) or (name.startswith("parse_log_") and is_installed()):
        registry = load_registry()
        if theirs in registry:
            return
    near = difflib.get_close_matches(theirs, PARSERS, n=3)
    hint = f", did you mean {' or '.join(near)}?" if near else "."
    raise InvalidSettings(
        f"setting 'log_parser': there is no parser {name!r}{hint} Known are "
        f"{', '.join(sorted(PARSERS))}; with the package swebench installed "
        "(pip install --no-deps swebench) also its own"
    )


def parse(
    name: str, log: str, *, instance_id: str = "", repo: str = "", version: str = ""
) -> Results:
    """Return the results in a log; raise `InvalidSettings` for a name that is not known here.

    Terminal codes are taken out before, but for parsers of the package, some of which read them.
    """
    check_parser(name)
    if name in PARSERS:
        return PARSERS[name](clean(log))
    return parse_with_swebench(
        name.removeprefix(PREFIX), log, instance_id=instance_id, repo=repo, version=version
    )
