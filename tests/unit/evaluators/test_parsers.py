"""Logs of test runners; `logs/` holds real ones, and samples of runners that are not here.

`logs/swebench.json`, which `remake_swebench` writes, is what swebench 5.0.2 makes of them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from evaluators.base import InvalidSettings
from evaluators.parsers import swebench
from evaluators.parsers.base import clean
from evaluators.parsers.junit import ReportUnreadable, parse_junit, summary_of
from evaluators.parsers.registry import PARSERS, check_parser, parse

LOGS = Path(__file__).parent / "logs"
GOLDEN: dict[str, list[dict[str, Any]]] = json.loads(
    (LOGS / "swebench.json").read_text(encoding="utf-8")
)
KINDS = "sub/test_kinds.py::"


def read(name: str) -> str:
    return (LOGS / name).read_text(encoding="utf-8")


def found(parser: str, log: str) -> dict[str, str]:
    """Return what a parser of ours finds in a log, with plain statuses."""
    return {name: str(status) for name, status in parse(parser, log).items()}


@pytest.mark.parametrize(
    ("log", "parsers", "results"),
    [
        pytest.param(log, case["parsers"], case["results"], id=f"{log}-{case['parsers'][0]}")
        for log, cases in GOLDEN.items()
        for case in cases
    ],
)
def test_parsers_of_swebench_s_names_read_as_swebench_does(
    log: str, parsers: list[str], results: dict[str, str]
) -> None:
    for parser in parsers:
        assert found(parser, read(log)) == results, parser


PYTEST = {
    "sub/test_broken.py": "ERROR",
    KINDS + "TestCase::test_expected": "XFAIL",
    KINDS + "TestCase::test_unit": "PASSED",
    KINDS + "TestGroup::TestInner::test_deep": "PASSED",
    KINDS + "TestGroup::test_in_class": "PASSED",
    KINDS + "test_error": "ERROR",
    KINDS + "test_fail": "FAILED",
    KINDS + "test_params[/a/b/c]": "PASSED",
    KINDS + "test_params[[x]]": "PASSED",
    KINDS + r"test_params[\xfc]": "PASSED",
    KINDS + "test_params[a - b]": "FAILED",
    KINDS + "test_params[log(photon /(cm**2 s))]": "PASSED",
    KINDS + r"test_params[new\nline]": "PASSED",
    KINDS + "test_params[plain]": "PASSED",
    KINDS + "test_params[with space]": "PASSED",
    KINDS + "test_pass": "PASSED",
    KINDS + "test_teardown": "ERROR",  # it passed, and what it had used could not be put away
    KINDS + "test_xfail": "XFAIL",
    KINDS + "test_xpass_strict": "FAILED",
}


def test_pytest_tells_the_same_by_its_summary_its_verbose_lines_and_its_report() -> None:
    """A test there prints `PASSED …::test_fail`, which a second, failing line outdoes."""
    summary = found("pytest", read("pytest-rA.log"))
    verbose = found("pytest", read("pytest-v.log"))
    report = {name: str(each) for name, each in parse_junit(read("pytest.xml").encode()).items()}

    skipped, xpass = {KINDS + "test_skip": "SKIPPED"}, KINDS + "test_xpass"
    assert verbose == PYTEST | skipped | {xpass: "XPASS"}
    assert report == PYTEST | skipped | {xpass: "PASSED"}  # it is not told apart there
    assert summary == PYTEST | {xpass: "XPASS", KINDS + "test_printed": "FAILED"}


def test_a_report_told_as_a_summary_is_read_by_every_parser_of_pytest_s() -> None:
    told = summary_of(parse_junit(read("pytest.xml").encode()))
    cut = found("parse_log_pytest", told)
    assert cut[KINDS + "test_params[log(photon"] == "PASSED"
    assert found("parse_log_pytest_v2", told)[KINDS + "test_params[a"] == "FAILED"
    assert found("parse_log_requests", told)[KINDS + "test_params[/c]"] == "PASSED"
    names = found("r2e", told)
    assert names["TestGroup::TestInner::test_deep"] == "PASSED"
    assert set(names.values()) == {"PASSED", "FAILED", "ERROR"}


def test_pytest_xdist_and_old_verbose_lines() -> None:
    log = (
        "[gw1] [ 50%] PASSED tests/test_a.py::test_one[x y] \n"
        "[gw0] FAILED tests/test_a.py::test_two\n"
        "tests/test_a.py::test_three SKIPPED (not here) [100%]\n"
        "tests/test_a.py::test_four PASSED\n"
        "this line ends with PASSED\n"
    )
    assert found("pytest", log) == {
        "tests/test_a.py::test_one[x y]": "PASSED",
        "tests/test_a.py::test_two": "FAILED",
        "tests/test_a.py::test_three": "SKIPPED",
        "tests/test_a.py::test_four": "PASSED",
    }


def test_unittest_s_verdicts_after_noise_and_its_faked_ones() -> None:
    case = "test_unit.T"
    assert found("unittest", read("unittest.log")) == {
        "test_broken (unittest.loader._FailedTest.test_broken)": "ERROR",
        f"test_described ({case}.test_described)": "PASSED",
        "Describe what is tested.": "PASSED",
        f"test_described_fail ({case}.test_described_fail)": "FAILED",
        "Describe what fails.": "FAILED",
        f"test_error ({case}.test_error)": "ERROR",
        f"test_expected ({case}.test_expected)": "XFAIL",
        f"test_fail ({case}.test_fail)": "FAILED",
        f"test_fakes ({case}.test_fakes)": "FAILED",
        f"test_ok ({case}.test_ok)": "PASSED",
        f"test_prints ({case}.test_prints)": "PASSED",
        f"test_prints_without_end ({case}.test_prints_without_end)": "PASSED",
        f"test_skip ({case}.test_skip)": "SKIPPED",
        f"test_subtests ({case}.test_subtests)": "FAILED",
        f"test_unexpected ({case}.test_unexpected)": "XPASS",
    }


def test_django_by_name_and_by_description() -> None:
    assert found("django", read("django.log")) == {
        "test_one (app.tests.OneTests)": "PASSED",
        "test_two (app.tests.OneTests)": "PASSED",
        "A described test.": "PASSED",
        "test_three (app.tests.OneTests)": "SKIPPED",
        "test_four (app.tests.OneTests)": "FAILED",
        "test_five (app.tests.OneTests)": "ERROR",
        "test_six (app.tests.OneTests)": "XFAIL",
        "test_seven (app.tests.OneTests)": "PASSED",
        "test_eight (app.tests.OneTests)": "PASSED",
    }


def test_go_keeps_a_failure_that_a_later_line_calls_passed() -> None:
    assert found("go", read("go.log")) == {
        "TestAdd": "PASSED",
        "TestTable": "FAILED",
        "TestTable/one_two": "PASSED",
        "TestTable/three": "FAILED",
        "TestSkipped": "SKIPPED",
        "TestFakes": "PASSED",
    }
    assert found("go_json", read("go.jsonl")) == {
        "example.com/calc/TestAdd": "PASSED",
        "example.com/calc/TestTable/three": "FAILED",
        "example.com/calc/TestSkipped": "SKIPPED",
        "example.com/broken": "FAILED",
        "example.com/other/TestAdd": "PASSED",
    }


def test_cargo_with_and_without_captured_output() -> None:
    results = {
        "tests::fails": "FAILED",
        "tests::later": "SKIPPED",
        "tests::panics": "PASSED",
        "tests::works": "PASSED",
        "src/lib.rs - add (line 3)": "PASSED",
    }
    assert found("cargo", read("cargo.log")) == results
    # A test prints `test tests::fails ... ok`, and the failure of that name stays one.
    assert found("cargo", read("cargo-nocapture.log"))["tests::fails"] == "FAILED"


def test_javascript_s_runners() -> None:
    assert found("jest", read("jest.log")) == {
        "adds": "FAILED",  # one of three of that title
        "sums > adds": "PASSED",
        "takes": "PASSED",
        "sums > takes": "PASSED",
        "sums > inner > adds": "PASSED",
        "later": "SKIPPED",
        "top > later": "SKIPPED",
        "others > adds": "FAILED",
        "write this": "SKIPPED",
        "others > write this": "SKIPPED",
    }
    assert found("vitest", read("vitest.log")) == {
        "src/sum.test.ts > sums > adds": "PASSED",
        "src/sum.test.ts > sums > inner > adds": "PASSED",
        "adds": "PASSED",
        "src/other.test.ts > others > fails": "FAILED",
        "fails": "FAILED",
        "src/other.test.ts > others > later": "SKIPPED",
        "later": "SKIPPED",
    }
    assert found("mocha", read("mocha.log")) == {
        "adds": "PASSED",
        "Calculator > adds": "PASSED",
        "subtracts": "PASSED",
        "Calculator > subtracts": "PASSED",
        "divides": "FAILED",
        "Calculator > divides": "FAILED",
        "throws": "PASSED",
        "Calculator > when broken > throws": "PASSED",
    }


def test_java_s_build_tools() -> None:
    assert found("maven", read("maven.log")) == {
        "com.example.AddTest": "PASSED",
        "com.example.SubTest": "FAILED",
        "com.example.SubTest.subtracts": "FAILED",
        "com.example.LaterTest": "SKIPPED",
    }
    assert found("gradle", read("gradle.log")) == {
        "com.example.AddTest > adds": "PASSED",
        "com.example.AddTest > adds(int) > [1] 2": "FAILED",
        "com.example.LaterTest > later": "SKIPPED",
    }


@pytest.mark.parametrize("parser", sorted(PARSERS))
def test_terminal_codes_and_line_ends_make_no_difference(parser: str) -> None:
    for log in sorted(LOGS.glob("*.log")):
        text = clean(log.read_text(encoding="utf-8"))
        coloured = "\n".join(f"\x1b[32m\x1b[1m{line}\x1b[0m\r" for line in text.split("\n"))
        assert parse(parser, coloured) == parse(parser, text)


@pytest.mark.parametrize("parser", sorted(PARSERS))
def test_what_is_no_log_has_no_results(parser: str) -> None:
    assert parse(parser, "") == parse(parser, "\0\n" * 100) == {}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"<testsuite>",
        b"no xml",
        b"\xff\xfe",
        b'<!DOCTYPE a [<!ENTITY b "c">]><testsuite><testcase name="&b;"/></testsuite>',
    ],
)
def test_a_report_that_is_none_is_said_to_be_none(data: bytes) -> None:
    with pytest.raises(ReportUnreadable):
        parse_junit(data)


def test_unknown_parsers_are_named_with_those_that_look_alike() -> None:
    with pytest.raises(InvalidSettings, match=r"no parser 'pytset', did you mean pytest\?"):
        check_parser("pytset")
    with pytest.raises(InvalidSettings, match="log_parser' is missing"):
        check_parser("")


def test_the_package_s_parsers_want_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swebench, "is_installed", lambda: False)
    with pytest.raises(InvalidSettings, match="pip install --no-deps swebench"):
        check_parser("swebench:parse_log_redis")


def test_the_package_s_modules_are_loaded_without_its_dependencies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package's own `__init__` imports what is not installed; its parsers do not need it."""
    package = tmp_path / "swebench"
    (package / "harness" / "log_parsers").mkdir(parents=True)
    (package / "__init__.py").write_text("import docker_is_not_here")
    (package / "harness" / "__init__.py").write_text("import modal_is_not_here")
    (package / "harness" / "constants.py").write_text("PASSED = 'PASSED'")
    (package / "harness" / "log_parsers" / "__init__.py").write_text(
        "from swebench.harness.constants import PASSED\n"
        "def parse_own(log, spec):\n"
        "    return {f'{spec.repo} {line}': PASSED for line in log.split()} | {'x': 'UNKNOWN'}\n"
        "PARSER_REGISTRY = {'parse_log_own': parse_own}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    before = {name for name in sys.modules if "swebench" in name}

    assert parse("parse_log_own", "a b", repo="o/r") == {"o/r a": "PASSED", "o/r b": "PASSED"}
    with pytest.raises(InvalidSettings, match="no parser 'swebench:parse_log_other'"):
        check_parser("swebench:parse_log_other")
    assert {name for name in sys.modules if "swebench" in name} == before
