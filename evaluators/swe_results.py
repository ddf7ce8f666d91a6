"""Turn what a run of the tests left into a verdict on the task."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from evaluators.base import Ran, RewardMalformed, RewardMissing
from evaluators.parsers.base import Results, Status, clean
from evaluators.parsers.junit import ReportUnreadable, parse_junit, summary_of
from evaluators.parsers.registry import parse
from evaluators.swe_task import SweTask

LISTED, NAME_CHARACTERS = 20, 120
PASSING = (Status.PASSED, Status.XFAIL, Status.XPASS)
FAILING = (Status.FAILED, Status.ERROR)
# Signs that a suite ran whose parser tells failures only; counts of nothing are none. After
# swebench.harness.grading.
_SUITE_RAN = re.compile(
    r"Executed [1-9]\d* of \d+|TOTAL: [1-9]\d* (?:SUCCESS|FAILED)|[1-9]\d* passing"
    r"|Tests:\s+[1-9]\d*|Test Suites:\s+(?:\d+ \w+, )*[1-9]\d* total|^# tests [1-9]\d*"
    r"|[1-9]\d* specs?, \d+ failures?|': ok$",
    re.MULTILINE,
)
_TIMING = (
    re.compile(r"\s*\[\s*\d+(?:\.\d+)?\s*m?s\s*\]\s*$", re.IGNORECASE),
    re.compile(r"\s+in\s+\d+(?:\.\d+)?\s+m?sec\b", re.IGNORECASE),
    re.compile(r"\s*\(\s*\d+(?:\.\d+)?\s*m?s\s*\)\s*$", re.IGNORECASE),
)


@dataclass(frozen=True, kw_only=True)
class Ended:
    """Hold how the run of the tests ended; `output` is what stands between its marks.

    `finished` says that the runner itself came to the end, `exit_code` is that of the tests.
    """

    finished: bool = False
    output: str = ""
    errors: str = ""
    log: str = ""
    exit_code: int | None = None
    report: bytes | None = None
    wants_report: bool = False
    timed_out: bool = False
    truncated: bool = False
    seconds: float = 0.0

    @classmethod
    def read(cls, ran: Ran | None, *, mark: str, report: bytes | None, wants_report: bool) -> Self:
        """Cut the output out at its marks, first where it begins and last where it ends."""
        if ran is None:
            return cls(wants_report=wants_report)
        log = ran.stdout.decode(errors="replace")
        begin = log.find(f"\n{mark} begin\n")
        ends = list(re.finditer(rf"\n{mark} end (\d+)\n", log))
        exit_code = int(ends[-1][1]) if ends else None
        output = log[begin + len(mark) + 8 : ends[-1].start()] if ends and begin >= 0 else ""
        output, own_code = _between_swebench_marks(output, mark)
        return cls(
            finished=bool(ends) and begin >= 0,
            output=output,
            errors=ran.stderr.decode(errors="replace"),
            log=log + ran.stderr.decode(errors="replace"),
            exit_code=exit_code if own_code is None else own_code,
            report=report,
            wants_report=wants_report,
            timed_out=ran.timed_out,
            truncated=ran.truncated,
            seconds=ran.seconds,
        )


def _between_swebench_marks(output: str, mark: str) -> tuple[str, int | None]:
    """Return what stands between an eval script's own marks, and the exit code that it tells."""
    code = re.search(rf">>>>> Test Exit Code {mark}: *(-?\d+)", output)
    start, end = (f">>>>> {word} Test Output {mark}" for word in ("Start", "End"))
    if start in output:
        output = output.split(start, 1)[1].rsplit(end, 1)[0]
    return output, int(code[1]) if code else None


def read_results(task: SweTask, ended: Ended) -> Results:
    """Return the results of the report or the log; raise `RewardMissing` when there are none."""
    if not ended.finished:
        return {}
    facts = {"instance_id": task.instance_id, "repo": task.repo, "version": task.version}
    if not ended.wants_report:
        return parse(task.log_parser, ended.output, **facts)
    if not ended.report:
        raise RewardMissing(
            "pytest left no report file; if the test command does not let PYTEST_ADDOPTS through, "
            "set 'report' to 'never'",
            log=ended.log,
        )
    try:
        reported = parse_junit(ended.report)
    except ReportUnreadable as error:
        raise RewardMalformed(f"pytest's report: {error}", log=ended.log) from error
    if task.log_parser == "pytest":
        return reported
    return parse(task.log_parser, summary_of(reported), **facts)


def read_parsed(data: bytes | None, *, log: str) -> Results:
    """Return the results that a task's own parser wrote: `{"tests": [{"name", "status"}]}`."""
    if data is None:
        raise RewardMissing("the task's parser_script wrote no output.json", log=log)
    try:
        tests = json.loads(data)["tests"]
        found = {str(each["name"]): str(each["status"]) for each in tests}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise RewardMalformed(
            "the task's parser_script wrote no map with 'tests' of 'name' and 'status'", log=log
        ) from error
    known = set(Status)
    return {name: Status(status) for name, status in found.items() if status in known}


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Hold the rewards by name and the details of a graded run."""

    rewards: Mapping[str, float]
    details: Mapping[str, Any]


def judge(task: SweTask, ended: Ended, results: Results, *, is_strict: bool = False) -> Verdict:
    """Return the verdict; raise `RewardMissing` when the run says nothing at all.

    A run that did not come to its end, or whose exit code tells of a failure that no result has,
    passes no test. `is_strict`: no excuse counts, neither an expected failure nor a skipped test.
    """
    reason = _disbelieved(task, ended, results)
    if (
        not reason
        and not results
        and not (task.eval_type == "fail_only" and _SUITE_RAN.search(clean(ended.output)))
    ):
        raise RewardMissing(
            f"the log has no test result that the parser {task.log_parser or 'parser_script'!r} "
            f"knows (exit code {ended.exit_code})",
            log=ended.log,
        )
    if task.mode != "tests":
        return _by_map(task, {} if reason else results, reason)
    found = _Found(results, is_strict=is_strict)
    fails = [name for name in task.fail_to_pass if reason or not found.passes(task, name)]
    breaks = [name for name in task.pass_to_pass if reason or not found.stays(task, name)]
    rewards = {
        "resolved": float(not fails and not breaks),
        "fail_to_pass": _fraction(task.fail_to_pass, fails),
        "pass_to_pass": _fraction(task.pass_to_pass, breaks),
    }
    failed = {"fail_to_pass": fails, "pass_to_pass": breaks}
    return _verdict(rewards, failed, results, reason)


def _disbelieved(task: SweTask, ended: Ended, results: Results) -> str:
    """Return why the results count for nothing; "" when they count."""
    if not ended.finished:
        return "timed_out" if ended.timed_out else "tests_not_finished"
    told = any(status in FAILING for status in results.values())
    if task.checks_exit_code and results and ended.exit_code and not told:
        return f"exit_code_{ended.exit_code}_without_a_failure"
    return ""


def _by_map(task: SweTask, results: Results, reason: str) -> Verdict:
    """Compare with the whole map, or with the tests that it calls passed."""
    expected = {clean(name): status for name, status in task.expected.items()}
    found = {clean(name): status for name, status in results.items()}
    if task.mode == "exact_map":
        wrong = [name for name, status in expected.items() if found.get(name) != status]
        extra = [name for name in found if name not in expected]
    else:
        expected = {name: status for name, status in expected.items() if status == "PASSED"}
        wrong = [name for name in expected if found.get(name) != Status.PASSED]
        extra = []
    resolved = float(not reason and not wrong and not extra)
    fraction = _fraction(tuple(expected), wrong)
    rewards = {"resolved": resolved, "fail_to_pass": fraction, "pass_to_pass": fraction}
    return _verdict(rewards, {"expected": wrong, "unexpected": extra}, results, reason)


def _verdict(
    rewards: Mapping[str, float],
    failed: Mapping[str, Sequence[str]],
    results: Results,
    reason: str,
) -> Verdict:
    details = {
        "resolved": rewards["resolved"] == 1.0,
        "tests_seen": len(results),
        "disbelieved": reason,
        "failed": {
            name: [each[:NAME_CHARACTERS] for each in names[:LISTED]]
            for name, names in failed.items()
        },
        "failed_count": {name: len(names) for name, names in failed.items()},
    }
    return Verdict(rewards=rewards, details=details)


def _fraction(names: Sequence[str], failed: Sequence[str]) -> float:
    return 1.0 if not names else 1 - len(failed) / len(names)


class _Found:
    """Look tests up by the names that data sets have for them."""

    def __init__(self, results: Results, *, is_strict: bool) -> None:
        self._results = results
        self._is_strict = is_strict
        self._untimed = {_untimed(name): status for name, status in results.items()}

    def passes(self, task: SweTask, name: str) -> bool:
        status = self._status(name)
        if task.eval_type == "fail_only":
            return status is not Status.FAILED
        return status in PASSING and not (self._is_strict and status is Status.XFAIL)

    def stays(self, task: SweTask, name: str) -> bool:
        """Tell whether a test that passed is not broken: it may be skipped now, as in swebench."""
        is_skipped = self._status(name) is Status.SKIPPED and not self._is_strict
        return is_skipped or self.passes(task, name)

    def _status(self, name: str) -> Status | None:
        """Return a test's status by its name, without times, or cut at a space.

        Lists that were made from logs hold parametrised names cut inside the brackets: such a name
        stands for all tests that begin so, if they agree on pass or fail.
        """
        status = self._results.get(name) or self._untimed.get(_untimed(name))
        if status is None and name.count("[") > name.count("]"):
            found = [each for full, each in self._results.items() if full.startswith(name)]
            if len({each in PASSING for each in found}) == 1:
                return found[0]
        return status


def _untimed(name: str) -> str:
    for pattern in _TIMING:
        name = pattern.sub("", name)
    return name.strip()
