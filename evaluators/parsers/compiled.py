"""Read the logs of `go test`, Cargo, Maven, Gradle and Ant."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from evaluators.parsers.base import Results, Status, clean, gather, lines_of

_GO = re.compile(r"^--- (PASS|FAIL|SKIP): (.+) \((.+)\)$")
_GO_STATUS = {"PASS": Status.PASSED, "FAIL": Status.FAILED, "SKIP": Status.SKIPPED}
_CARGO = re.compile(r"^test +(?P<name>.+?) \.\.\.(?: (?P<rest>.*))?$")
_CARGO_END = re.compile(r"^(ok|FAILED|ignored)\b")
_CARGO_STATUS = {"ok": Status.PASSED, "FAILED": Status.FAILED, "ignored": Status.SKIPPED}
_MAVEN_RUN = re.compile(r"-Dtest=(\S+)")
_MAVEN_BUILD = re.compile(r"BUILD (SUCCESS|FAILURE)$")
_SUREFIRE = re.compile(
    r"^(?:\[(?:INFO|ERROR|WARNING)\] +)?Tests run: (\d+), Failures: (\d+), Errors: (\d+), "
    r"Skipped: (\d+).*?(?: -- in | - in )(\S+)"
)
_SUREFIRE_TEST = re.compile(
    r"^\[(?:ERROR|WARNING)\] +(\S+?)\.(\w+(?:\[.*\])?)(?:\(.*\))? +(?:--|-)? *Time elapsed: .*"
    r"<<< (FAILURE|ERROR)!"
)
_GRADLE = re.compile(r"^([^>\s].* > .+?) (PASSED|FAILED|SKIPPED)$")
_GRADLE_STATUS = {
    "PASSED": Status.PASSED,
    "FAILED": Status.FAILED,
    "SKIPPED": Status.SKIPPED,
}
_ANT = re.compile(r"^\[junit\]\s+\[(PASS|FAIL|ERR)\]\s+(.*)$")


def parse_go(log: str) -> Results:
    """Return the tests of `go test -v` by name, subtests as `Test/case`."""

    def told() -> Iterator[tuple[str, Status]]:
        for line in lines_of(log):
            if match := _GO.match(line.strip()):
                yield match[2], _GO_STATUS[match[1]]

    return gather(told())


def parse_go_json(log: str) -> Results:
    """Return the tests of `go test -json` as `package/Test`; a package that failed to build too."""

    def told() -> Iterator[tuple[str, Status]]:
        for line in lines_of(log):
            if not line.startswith("{"):
                continue
            try:
                event = json.loads(line)
            except (ValueError, RecursionError):
                continue
            action = str(event.get("Action", "")).upper()
            if action in _GO_STATUS and isinstance(event.get("Test"), str):
                yield f"{event.get('Package', '')}/{event['Test']}", _GO_STATUS[action]
            elif action == "FAIL":
                yield str(event.get("Package", "")), Status.FAILED

    return gather(told())


def parse_cargo(log: str) -> Results:
    """Return Rust's tests by path; what a test prints with `--nocapture` may part the line."""
    return gather(_cargo(clean(log)))


def _cargo(text: str) -> Iterator[tuple[str, Status]]:
    pending = ""
    for raw in text.split("\n"):
        line = raw.strip()
        match = _CARGO.match(line)
        if match:
            name = match["name"].removesuffix(" - should panic")
            rest = match["rest"] or ""
        elif pending:
            name, rest = pending, line
        else:
            continue
        end = _CARGO_END.match(rest)
        if end:
            yield name, _CARGO_STATUS[end[1]]
            pending = ""
        else:
            pending = name


def parse_log_cargo(log: str) -> Results:
    """Return as swebench does: one line a test, last one counts."""
    results: Results = {}
    for line in log.split("\n"):
        match = re.match(r"^test\s+(\S+)\s+\.\.\.\s+(\w+)$", line.strip())
        if match and match[2] in ("ok", "FAILED"):
            results[match[1]] = _CARGO_STATUS[match[2]]
    return results


def parse_log_gotest(log: str) -> Results:
    """Return as swebench does: the last line of a test counts."""
    results: Results = {}
    for line in log.split("\n"):
        if match := _GO.match(line.strip()):
            results[match[2]] = _GO_STATUS[match[1]]
    return results


def parse_maven(log: str) -> Results:
    """Return Surefire's classes, and `class.method` of tests that failed.

    Maven names no test that passed; a class stands for its tests.
    """

    def told() -> Iterator[tuple[str, Status]]:
        for line in lines_of(log):
            if match := _SUREFIRE.match(line):
                run, failed, errors, skipped = (int(match[each]) for each in range(1, 5))
                bad = Status.FAILED if failed else Status.ERROR
                good = Status.SKIPPED if run == skipped else Status.PASSED
                yield match[5], bad if failed or errors else good
            elif match := _SUREFIRE_TEST.match(line):
                status = Status.FAILED if match[3] == "FAILURE" else Status.ERROR
                yield f"{match[1]}.{match[2]}", status

    return gather(told())


def parse_log_maven(log: str) -> Results:
    """Return one result for each `-Dtest=NAME` of the traced commands, in order, as swebench."""
    waiting: list[str] = []
    early: list[str] = []
    results: Results = {}
    status = {"SUCCESS": Status.PASSED, "FAILURE": Status.FAILED}
    for line in log.split("\n"):
        if run := re.match(r"^.*-Dtest=(\S+).*$", line.strip()):
            waiting.append(run[1])
        if build := re.match(r"^.*BUILD (SUCCESS|FAILURE)$", line.strip()):
            if waiting:
                results[waiting.pop(0)] = status[build[1]]
            else:
                early.append(build[1])
    for name, word in zip(waiting, early, strict=False):
        results[name] = status[word]
    return results


def parse_gradle(log: str) -> Results:
    """Return Gradle's tests as `Class > method`."""

    def told() -> Iterator[tuple[str, Status]]:
        for line in lines_of(log):
            if match := _GRADLE.match(line.strip()):
                yield match[1], _GRADLE_STATUS[match[2]]

    return gather(told())


def parse_log_gradle_custom(log: str) -> Results:
    """Return as swebench does: a status may stand on a line after the name."""
    results: Results = {}
    pending = None
    for raw in log.split("\n"):
        line = raw.strip()
        if match := re.match(r"^([^>].+)\s+(PASSED|FAILED)$", line):
            results[match[1]] = _GRADLE_STATUS[match[2]]
            pending = None
        elif match := re.match(r"^([^>]\S*\s+>\s+\S+)$", line):
            pending = match[1]
        elif pending and line in ("PASSED", "FAILED"):
            results[pending] = _GRADLE_STATUS[line]
            pending = None
    return results


def parse_log_ant(log: str) -> Results:
    """Return Ant's JUnit tests, as swebench does."""
    results: Results = {}
    for line in log.split("\n"):
        if match := _ANT.match(line.strip()):
            results[match[2]] = Status.PASSED if match[1] == "PASS" else Status.FAILED
    return results
