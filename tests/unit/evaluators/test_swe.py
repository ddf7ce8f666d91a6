"""Repository tasks: what a payload may say, and what becomes of what the sandboxes left."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from evaluators.base import (
    Artefacts,
    Base,
    EvaluatorFault,
    InvalidSettings,
    Phase,
    PhaseResult,
    Ran,
    RewardMalformed,
    RewardMissing,
    Score,
)
from evaluators.swe import SweEvaluator
from evaluators.swe_patch import paths_of, read_taken, steering_words
from evaluators.swe_phases import wants_report
from evaluators.swe_task import read_task
from evaluators.unfit import TaskUnfit

SWE = SweEvaluator()
COMMIT = "0f1be141b042041e022b21c1c52e7cf33d5315f2"
DIFF = b"diff --git a/calc.py b/calc.py\n--- a/calc.py\n+++ b/calc.py\n@@ -1 +1 @@\n-a\n+b\n"
TEST_PATCH = """diff --git a/tests/test_calc.py b/tests/test_calc.py
--- a/tests/test_calc.py
+++ b/tests/test_calc.py
@@ -1 +1 @@
-old
+new
"""
PAYLOAD: dict[str, Any] = {
    "base_commit": COMMIT,
    "test_patch": TEST_PATCH,
    "FAIL_TO_PASS": '["tests/test_calc.py::test_new"]',
    "PASS_TO_PASS": '["tests/test_calc.py::test_old"]',
    "test_cmd": "pytest -rA tests/test_calc.py",
    "log_parser": "pytest",
}
LOG_ONLY = {"report": "never"}
BOTH = b"PASSED tests/test_calc.py::test_new\nPASSED tests/test_calc.py::test_old\n"


def ran(exit_code: int | None = 0, stdout: bytes = b"", **values: Any) -> Ran:
    return Ran(exit_code=exit_code, stdout=stdout, stderr=b"", seconds=1.0, **values)


def first_line(status: str, diff: bytes = b"") -> bytes:
    return f"prorl-patch {status}\n".encode() + diff


class Carrying:
    """Carry a grading out by hand: what the sandboxes would have left is given."""

    def __init__(self, payload: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        self.payload, self.settings = dict(payload), dict(settings)
        self.artefacts = Artefacts()
        SWE.validate(self.settings, self.payload)

    def next(self) -> Phase | None:
        return SWE.next_phase(self.settings, self.payload, self.artefacts)

    def leave(self, *commands: Ran, **files: bytes | None) -> None:
        """Leave commands' results, and files by the last part of their path."""
        phase = self.next()
        assert phase is not None
        collected = {
            path: files.get(path.rsplit("/", 1)[1].split(".")[0]) for path in phase.collect
        }
        result = PhaseResult(name=phase.name, commands=commands, files=collected)
        self.artefacts = Artefacts(phases=(*self.artefacts.phases, result))

    def mark(self) -> str:
        """Return the word that stands at both ends of the tests' output."""
        phase = self.next()
        assert phase is not None
        folder = next(path for path in phase.files if path.endswith("/run.sh"))
        return folder.split("/")[2].removeprefix(".prorl-")

    def score(self) -> Score:
        assert self.next() is None
        return SWE.score(self.settings, self.payload, self.artefacts)


def score_of(
    log: bytes,
    *,
    code: int = 0,
    payload: Mapping[str, Any] = PAYLOAD,
    settings: Mapping[str, Any] = LOG_ONLY,
    report: bytes | None = None,
    **values: Any,
) -> Score:
    """Score a run of the tests that printed a log and ended with a code."""
    carrying = Carrying(payload, settings)
    carrying.leave(ran(), out=first_line(f"ok {len(DIFF)}", DIFF))
    mark = carrying.mark()
    output = f"install\n\n{mark} begin\n".encode() + log + f"\n{mark} end {code}\n".encode()
    carrying.leave(ran(), ran(stdout=output, **values), report=report)
    return carrying.score()


def test_a_diff_is_taken_where_the_agent_worked_and_tested_where_it_never_was() -> None:
    carrying = Carrying(PAYLOAD, {})
    first = carrying.next()
    assert first is not None
    assert (first.base, first.workspace, first.tests) == (Base.AGENT, ("/testbed",), False)
    assert not any(b"test_calc" in data for data, _ in first.files.values())

    carrying.leave(ran(), out=first_line(f"ok {len(DIFF)}", DIFF))
    second = carrying.next()
    assert second is not None
    assert (second.base, second.network) == (Base.PREPARED, False)
    contents = {path.rsplit("/", 1)[1]: data for path, (data, _) in second.files.items()}
    assert contents["agent.diff"] == DIFF
    assert contents["tests.diff"] == TEST_PATCH.encode()
    assert contents["eval.sh"] == b"pytest -rA tests/test_calc.py\n"
    assert b"junitxml" in contents["run.sh"]
    assert len(second.commands) == 2


def test_both_lists_decide() -> None:
    score = score_of(BOTH)
    assert score.rewards == {
        "reward": 1.0,
        "resolved": 1.0,
        "fail_to_pass": 1.0,
        "pass_to_pass": 1.0,
        "patch_applied": 1.0,
    }
    half = score_of(
        BOTH.replace(
            b"PASSED tests/test_calc.py::test_old", b"FAILED tests/test_calc.py::test_old"
        ),
        code=1,
    )
    assert (half.reward, half.rewards["fail_to_pass"], half.rewards["pass_to_pass"]) == (0, 1, 0)
    assert half.details["failed"] == {
        "fail_to_pass": [],
        "pass_to_pass": ["tests/test_calc.py::test_old"],
    }
    assert score_of(BOTH, settings={**LOG_ONLY, "reward": "fail_to_pass"}).reward == 1.0


@pytest.mark.parametrize(
    ("line", "fixed", "kept"),
    [
        ("PASSED", 1.0, 1.0),
        ("XFAIL", 1.0, 1.0),
        ("XPASS", 1.0, 1.0),
        ("FAILED", 0.0, 0.0),
        ("ERROR", 0.0, 0.0),
        ("nothing of", 0.0, 0.0),
    ],
)
def test_what_a_status_is_worth(line: str, fixed: float, kept: float) -> None:
    other = b"FAILED tests/test_calc.py::test_more\n"
    log = (
        other
        + f"{line} tests/test_calc.py::test_new\n{line} tests/test_calc.py::test_old\n".encode()
    )
    score = score_of(log, code=1)
    assert (score.rewards["fail_to_pass"], score.rewards["pass_to_pass"]) == (fixed, kept)


def test_a_skipped_test_fixes_nothing_and_breaks_nothing() -> None:
    log = b"a/tests/test_a.py::test_x SKIPPED\n"
    lists = {
        "fail_to_pass": ["a/tests/test_a.py::test_x"],
        "pass_to_pass": ["a/tests/test_a.py::test_x"],
    }
    score = score_of(log, payload={**_without_lists(), **lists})
    assert (score.rewards["fail_to_pass"], score.rewards["pass_to_pass"]) == (0.0, 1.0)


@pytest.mark.parametrize(
    "line",
    [
        "+    import pytest; pytest.xfail('later')",
        "+    raise unittest.SkipTest",
        "+    self.skipTest('x')",
        "+    pytest.skip ('x')",
        "+    return skipped",
    ],
)
def test_a_diff_that_brings_excuses_gets_none(line: str) -> None:
    """Code under test can have its own test skipped, or failed as if that were expected."""
    diff = DIFF + line.encode() + b"\n"
    carrying = Carrying(PAYLOAD, LOG_ONLY)
    carrying.leave(ran(), out=first_line(f"ok {len(diff)}", diff))
    log = b"XFAIL tests/test_calc.py::test_new\ntests/test_calc.py::test_old SKIPPED\n"
    output = "\n{0} begin\n{1}\n{0} end 0\n".format(carrying.mark(), log.decode())
    carrying.leave(ran(), ran(stdout=output.encode()))
    score = carrying.score()
    assert score.reward == float(score.details["excuses_count"]) == float("skipped" in line)


def test_names_cut_at_a_space_stand_for_tests_that_agree() -> None:
    payload = {**_without_lists(), "fail_to_pass": ["t/test_a.py::test[log(a"], "pass_to_pass": []}
    agreed = b"PASSED t/test_a.py::test[log(a b)]\nPASSED t/test_a.py::test[log(a c)]\n"
    assert score_of(agreed, payload=payload).reward == 1.0
    assert score_of(agreed.replace(b"PASSED", b"FAILED", 1), code=1, payload=payload).reward == 0.0


def test_names_with_times_are_the_same_test() -> None:
    payload = {
        **_without_lists(),
        "log_parser": "vitest",
        "test_cmd": "npx vitest",
        "fail_to_pass": ["adds (3 ms)"],
    }
    assert score_of(" ✓ a.ts > adds 12ms\n".encode(), payload=payload).reward == 1.0


def test_only_what_stands_between_the_marks_is_read() -> None:
    carrying = Carrying(PAYLOAD, LOG_ONLY)
    carrying.leave(ran(), out=first_line(f"ok {len(DIFF)}", DIFF))
    mark = carrying.mark()
    before_and_after = BOTH + f"\n{mark} begin\nFAILED a.py::b\n\n{mark} end 1\n".encode() + BOTH
    carrying.leave(ran(), ran(stdout=before_and_after))
    assert carrying.score().rewards["fail_to_pass"] == 0.0


def test_marks_that_anybody_knows_are_no_marks() -> None:
    script = "pytest || true\n: '>>>>> Start Test Output'\npytest -rA\n: '>>>>> End Test Output'\n"
    payload = {**PAYLOAD, "eval_script": script, "test_cmd": None}
    carrying = Carrying(payload, LOG_ONLY)
    carrying.leave(ran(), out=first_line(f"ok {len(DIFF)}", DIFF))
    mark = carrying.mark()
    phase = carrying.next()
    assert phase is not None
    files = {path.rsplit("/", 1)[1]: data.decode() for path, (data, _) in phase.files.items()}
    assert f"Start Test Output {mark}'" in files["eval.sh"]
    assert files["tests.diff"] == ""  # the script applies it itself
    faked = b">>>>> Start Test Output\n" + BOTH + b">>>>> End Test Output\n"
    start, end = (f"+ : '>>>>> {word} Test Output {mark}'\n" for word in ("Start", "End"))
    real = f"{start}FAILED x.py::y\n{end}"
    log = f"\n{mark} begin\n".encode() + faked + real.encode() + f"\n{mark} end 0\n".encode()
    carrying.leave(ran(), ran(stdout=log))
    assert carrying.score().reward == 0.0


def test_an_exit_code_without_a_failure_is_not_believed() -> None:
    score = score_of(BOTH, code=3)
    assert (score.reward, score.details["disbelieved"]) == (0.0, "exit_code_3_without_a_failure")
    assert score_of(BOTH, code=3, settings={**LOG_ONLY, "exit_code": "ignore"}).reward == 1.0


def test_a_run_that_did_not_end_counts_for_nothing() -> None:
    carrying = Carrying(PAYLOAD, LOG_ONLY)
    carrying.leave(ran(), out=first_line(f"ok {len(DIFF)}", DIFF))
    log = f"\n{carrying.mark()} begin\n".encode() + BOTH
    carrying.leave(ran(), ran(None, log, timed_out=True))
    score = carrying.score()
    assert (score.reward, score.rewards["pass_to_pass"]) == (0.0, 0.0)
    assert score.details["disbelieved"] == "timed_out"


def test_a_log_without_results_says_nothing_about_the_diff() -> None:
    with pytest.raises(RewardMissing, match="no test result that the parser 'pytest' knows"):
        score_of(b"pytest: command not found\n", code=127)


REPORT = (
    b'<testsuites><testsuite><testcase classname="tests.test_calc" name="test_new" '
    b'file="tests/test_calc.py"/><testcase classname="tests.test_calc" name="test_old" '
    b'file="tests/test_calc.py"/></testsuite></testsuites>'
)


def test_where_pytest_is_the_command_its_report_alone_is_read() -> None:
    assert score_of(b"nothing", settings={}, report=REPORT).details["results_from"] == "report"
    assert score_of(b"nothing", settings={}, report=REPORT).reward == 1.0
    with pytest.raises(RewardMissing, match="'report' to 'never'"):
        score_of(BOTH, settings={}, report=None)
    with pytest.raises(RewardMalformed, match="no XML"):
        score_of(BOTH, settings={}, report=b"<a>")


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("pytest -rA", True),
        ("python -m pytest --list tests/list", True),
        (". /opt/conda.sh && conda activate testbed && python -m pytest -rA a.py", True),
        ("pip install pytest\n/usr/bin/pytest a.py", True),
        ("pytest a.py; pytest b.py", False),
        ("tox -e py311", False),
        ("# pytest\nmake test", False),
        ("./runtests --pytest-like", False),
    ],
)
def test_when_a_report_is_asked_for(command: str, expected: bool) -> None:
    payload = {**PAYLOAD, "test_cmd": command}
    assert wants_report(read_task({}, payload)) is expected
    assert wants_report(read_task({"report": "always"}, payload))


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        ("no_repository", "no_repository"),
        ("no_base", "no_base"),
        ("no_workdir", "no_workdir"),
        ("ok 5", "git_failed"),  # there are not five bytes
        ("nonsense", "git_failed"),
    ],
)
def test_a_diff_that_cannot_be_taken_is_the_policy_s_if_the_prepared_sandbox_has_a_repository(
    status: str, reason: str
) -> None:
    for code, fault in ((0, None), (21, TaskUnfit)):
        carrying = Carrying(PAYLOAD, {})
        carrying.leave(ran(), out=first_line(status))
        phase = carrying.next()
        assert phase is not None
        assert len(phase.commands) == 1  # there is nothing to test
        carrying.leave(ran(code))
        if fault is None:
            score = carrying.score()
            assert (score.reward, score.details["patch_failed"]) == (0.0, reason)
        else:
            with pytest.raises(fault, match="no git repository") as caught:
                carrying.score()
            assert caught.value.is_graders


def test_a_diff_that_is_too_large_is_not_tested() -> None:
    for data in (first_line("too_large 10"), b""):
        carrying = Carrying(PAYLOAD, {"patch_bytes": 10})
        carrying.leave(ran(), out=data)
        score = carrying.score()
        assert (score.reward, score.details["patch_failed"]) == (
            0.0,
            "too_large: more than 10 bytes",
        )


@pytest.mark.parametrize(
    ("code", "fault", "message"),
    [
        (20, TaskUnfit, "no folder /testbed"),
        (22, TaskUnfit, f"no commit {COMMIT}"),
        (32, RewardMissing, "test_patch does not apply"),
        (99, RewardMissing, "could not be brought"),
    ],
)
def test_what_hinders_the_tests_is_told(
    code: int, fault: type[EvaluatorFault], message: str
) -> None:
    carrying = Carrying(PAYLOAD, {})
    carrying.leave(ran(), out=first_line(f"ok {len(DIFF)}", DIFF))
    carrying.leave(ran(code), ran(97))
    with pytest.raises(fault, match=message):
        carrying.score()


def test_a_diff_that_does_not_apply_is_worth_nothing() -> None:
    carrying = Carrying(PAYLOAD, {})
    carrying.leave(ran(), out=first_line(f"ok {len(DIFF)}", DIFF))
    carrying.leave(ran(30), ran(97))
    score = carrying.score()
    assert (score.reward, score.rewards["patch_applied"]) == (0.0, 0.0)
    assert score.details["patch_failed"] == "does_not_apply"


def test_without_a_commit_the_prepared_sandbox_is_asked_for_its_own() -> None:
    carrying = Carrying({**PAYLOAD, "base_commit": ""}, {})
    first = carrying.next()
    assert first is not None
    assert (first.name, first.base) == ("base", Base.PREPARED)
    carrying.leave(ran(0, COMMIT.encode() + b"\n"))
    second = carrying.next()
    assert second is not None
    assert any(COMMIT.encode() in data for data, _ in second.files.values())

    broken = Carrying({**PAYLOAD, "base_commit": None}, {})
    broken.leave(ran(128))
    with pytest.raises(TaskUnfit, match="no git repository"):
        broken.score()


def _without_lists() -> dict[str, Any]:
    return {name: value for name, value in PAYLOAD.items() if "PASS" not in name}


@pytest.mark.parametrize(
    ("log", "exact", "passed"),
    [
        (b"PASSED r2e/test_a.py::test_a\nFAILED r2e/test_a.py::T::test_b\n", 1.0, 1.0),
        (b"PASSED r2e/test_a.py::test_a\nPASSED r2e/test_a.py::T::test_b\n", 0.0, 1.0),
        (b"PASSED r2e/test_a.py::test_a\n", 0.0, 1.0),
        (b"PASSED r2e/test_a.py::test_a\nFAILED a.py::T::test_b\nPASSED b.py::c\n", 0.0, 1.0),
        (b"FAILED r2e/test_a.py::test_a\nFAILED r2e/test_a.py::T::test_b\n", 0.0, 0.0),
    ],
)
def test_whole_maps_and_what_passes_of_them(log: bytes, exact: float, passed: float) -> None:
    expected = '{"test_a": "PASSED", "T::\\u001b[1mtest_b\\u001b[0m": "FAILED"}'
    payload = {**_without_lists(), "log_parser": "r2e", "expected": expected}
    summary = b"==== short test summary info ====\n" + log
    assert score_of(summary, code=1 if b"FAILED" in log else 0, payload=payload).reward == exact
    lenient = {**payload, "mode": "expected_passed"}
    assert score_of(summary, code=1 if b"FAILED" in log else 0, payload=lenient).reward == passed


def test_a_parser_script_reads_the_log_in_a_sandbox_of_its_own() -> None:
    payload = {
        **_without_lists(),
        "run_script": "echo run",
        "parser_script": "print('parse')",
        "selected_test_files_to_run": '["a.js", "b.js"]',
        "fail_to_pass": "['a.js | works']",
        "test_cmd": None,
        "log_parser": None,
    }
    output = b'{"tests": [{"name": "a.js | works", "status": "PASSED"}]}'
    for data, fault in ((output, None), (b"[]", RewardMalformed), (None, RewardMissing)):
        carrying = Carrying(payload, {})
        carrying.leave(ran(), out=first_line(f"ok {len(DIFF)}", DIFF))
        phase = carrying.next()
        assert phase is not None
        files = {path.rsplit("/", 1)[1]: content for path, (content, _) in phase.files.items()}
        assert b"run_script.sh a.js,b.js" in files["run.sh"]
        assert "parser.py" not in files
        log = "\n{0} begin\nout\n{0} end 0\n".format(carrying.mark()).encode()
        carrying.leave(ran(), ran(0, log))
        parse = carrying.next()
        assert parse is not None
        assert parse.base is Base.PREPARED
        contents = {path.rsplit("/", 1)[1]: content for path, (content, _) in parse.files.items()}
        assert contents["stdout.log"] == b"out"
        carrying.leave(ran(), output=data)
        if fault is None:
            assert carrying.score().reward == 1.0
        else:
            with pytest.raises(fault):
                carrying.score()


def test_parsers_that_tell_failures_only() -> None:
    payload = {
        **_without_lists(),
        "log_parser": "mocha",
        "test_cmd": "npm test",
        "fail_to_pass": ["divides"],
        "eval_type": "fail_only",
    }
    assert score_of(b"  2 passing (3ms)\n", payload=payload).reward == 1.0
    with pytest.raises(RewardMissing):
        score_of(b"  0 passing (3ms)\n", payload=payload)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"FAIL_TO_PASS": "[]", "PASS_TO_PASS": "[]"}, "nothing could be graded"),
        ({"FAIL_TO_PASS": "no list"}, "fail_to_pass"),
        ({"FAIL_TO_PASS": [1]}, "fail_to_pass"),
        ({"test_cmd": ""}, "how the tests are run"),
        ({"test_cmd": 5}, "test_cmd"),
        ({"log_parser": "nope"}, "no parser 'nope'"),
        ({"log_parser": ""}, "log_parser"),
        ({"workdir": "testbed"}, "absolute path"),
        ({"base_commit": "--help"}, "base_commit"),
        ({"base_commit": "a b"}, "base_commit"),
        ({"test_files": {"../x": "y"}}, "no path inside"),
        ({"test_files": {".git/hooks/x": "y"}}, "no path inside"),
        ({"expected": "[]"}, "expected"),
        ({"mode": "exact_map"}, "needs 'expected'"),
        ({"mode": "other"}, "mode"),
        ({"eval_type": "other"}, "eval_type"),
        ({"run_script": "x"}, "parser_script"),
    ],
)
def test_wrong_payloads_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidSettings, match=message):
        SWE.validate({}, {**PAYLOAD, **change})


@pytest.mark.parametrize(
    "settings",
    [
        {"protect": "conftest.py"},
        {"protect": [""]},
        {"report": "maybe"},
        {"exit_code": 1},
        {"reward": "score"},
        {"patch_bytes": 0},
        {"patch_bytes": 1.5},
        {"patch_bytes": 10**8},
        {"log_bytes": 10**9},
        {"test_seconds": 0},
        {"network": "yes"},
        {"timeout": 5},
    ],
)
def test_wrong_settings_are_named(settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidSettings, match=next(iter(settings))):
        SWE.validate(settings, PAYLOAD)


def test_settings_stand_in_for_what_a_row_lacks() -> None:
    row = {name: value for name, value in PAYLOAD.items() if name not in ("test_cmd", "log_parser")}
    settings = {"test_cmd": "pytest -rA {test_files}", "log_parser": "pytest", "workdir": "/repo/"}
    task = read_task(settings, row)
    assert (task.script, task.workdir) == ("pytest -rA tests/test_calc.py", "/repo")


def test_what_the_tests_bring_is_restored_and_what_they_test_is_not() -> None:
    payload = {
        **_without_lists(),
        "fail_to_pass": ["src/calc.py::calc.add", "tests/unit/test_x.py::T::test_a[b]"],
        "test_files": {"test_more.py": "x"},
    }
    assert read_task({}, payload).restored == (
        "tests/test_calc.py",
        "test_more.py",
        "tests/unit/test_x.py",
        "tests/__init__.py",
        "tests/unit/__init__.py",
    )


def test_the_paths_of_a_diff() -> None:
    patch = (
        "diff --git a/a b.txt b/a b.txt\nnew file mode 100644\nindex 000..111\n--- /dev/null\n"
        "+++ b/a b.txt\t\n@@ -0,0 +1 @@\n+diff --git a/no b/no\n--- a/no\n+++ b/no\n"
        'diff --git "a/\\303\\274.txt" "b/\\303\\274.txt"\nold mode 100644\nnew mode 100755\n'
        "diff --git a/old.py b/new.py\nsimilarity index 100%\n"
        "rename from old.py\nrename to new.py\n"
        "diff --git a/b c.bin b/b c.bin\nindex 1..2 100644\nGIT binary patch\nliteral 1\nAB\n"
        "diff --git a/gone.py b/gone.py\ndeleted file mode 100644\n--- a/gone.py\n+++ /dev/null\n"
    )
    assert paths_of(patch) == ("a b.txt", "ü.txt", "old.py", "new.py", "b c.bin", "gone.py")


def test_what_is_no_diff_of_ours() -> None:
    assert read_taken(None).trouble == "git_failed"
    assert read_taken(b"\xff\xfe\n").trouble == "git_failed"
    assert read_taken(b"prorl-patch \n").trouble == "git_failed"
    assert read_taken(b"prorl-patch ok 0\n").diff == b""
    assert read_taken(b"prorl-patch ok 0\n").trouble == ""


def test_diffs_that_a_person_should_look_at() -> None:
    assert steering_words(b"+import os; os._exit(0)\n-addopts\n+def pytest_runtest_x():\n") == (
        "os._exit",
        "pytest_runtest_x",
    )
    assert score_of(BOTH).details["steering_words"] == []
