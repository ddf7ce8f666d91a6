"""Read the logs of Python's unittest, Django's runner, sympy's and R2E's names."""

from __future__ import annotations

import re
from collections.abc import Iterator

from evaluators.parsers.base import Results, Status, clean, gather, lines_of
from evaluators.parsers.pytest_log import summary_of_first

_ENDS = {
    "ok": Status.PASSED,
    "OK": Status.PASSED,
    "FAIL": Status.FAILED,
    "ERROR": Status.ERROR,
    "expected failure": Status.XFAIL,
    "unexpected success": Status.XPASS,
}
_LINE = re.compile(r"^(?P<name>\S.*?) \.\.\. +(?P<end>.*)$")
_TEST = re.compile(r"\w+ \([\w.<>]+\)")
_RULED = re.compile(r"^={70}\n(FAIL|ERROR): (.+)$", re.MULTILINE)


def parse_unittest(log: str) -> Results:
    """Return names as `-v` prints them: `test_add (tests.test_calc.TestCalc.test_add)`.

    A test with a docstring is there twice, by its name and by the docstring's first line, as data
    sets use both. What a test prints stands between its name and its verdict, which then ends a
    later line.
    """
    return gather(_unittest(clean(log)))


def _unittest(text: str) -> Iterator[tuple[str, Status]]:
    for match in _RULED.finditer(text):
        yield _plain(match[2]), Status.FAILED if match[1] == "FAIL" else Status.ERROR
    pending: list[str] = []
    above = ""
    for line in text.split("\n"):
        begun = _LINE.match(line)
        status = None
        if begun:
            described = bool(above) and not _TEST.match(begun["name"])
            pending = [_plain(begun["name"]), *([_plain(above)] if described else [])]
            status = _status(begun["end"])
            if status is None and begun["end"].endswith("ok"):
                status = Status.PASSED  # after output without an end; a failure is told again below
        elif pending:
            late = re.search(r"(?:^|\W)(ok|FAIL|ERROR)$", line)
            status = _status(line) or (_ENDS[late[1]] if late else None)
        if status is not None:
            yield from ((name, status) for name in pending)
            pending = []
        above = line.strip() if _TEST.fullmatch(line.strip()) else ""


def _status(end: str) -> Status | None:
    if end.startswith("skipped"):
        return Status.SKIPPED
    return _ENDS.get(end.strip())


def _plain(name: str) -> str:
    """Return a test's name without the parameters of a subtest."""
    match = _TEST.match(name)
    return match[0] if match else name.strip()


def parse_log_django(log: str) -> Results:
    """Return the tests of Django's runner, as swebench reads them line by line."""
    results: Results = {}
    previous = None
    for raw in log.split("\n"):
        line = raw.strip()
        if "--version is equivalent to version" in line:
            results["--version is equivalent to version"] = Status.PASSED
        if " ... " in line:
            previous = line.split(" ... ")[0]
        for end in (" ... ok", " ... OK", " ...  OK"):
            if line.endswith(end):
                if line.startswith("Applying sites.0002_alter_domain_unique...test_no_migrations"):
                    line = line.split("...", 1)[-1].strip()
                results[line.rsplit(end, 1)[0]] = Status.PASSED
                break
        _django_failures(line, results)
        if line.startswith("ok") and previous is not None:
            results[previous] = Status.PASSED
    for pattern in _DJANGO_SPREAD:
        for match in pattern.finditer(log):
            results[match[1]] = Status.PASSED
    return results


_DJANGO_SPREAD = tuple(
    re.compile(rf"^(.*?)\s\.\.\.\s{middle}\nok$", re.MULTILINE)
    for middle in (
        r"Testing\ against\ Django\ installed\ in\ (?s:.*?)\ silenced\)\.",
        r"Internal\ Server\ Error:\ \/.*\/",
        r"System check identified no issues \(0 silenced\)",
    )
)


def _django_failures(line: str, results: Results) -> None:
    if " ... skipped" in line:
        results[line.split(" ... skipped")[0]] = Status.SKIPPED
    for word, status in (("FAIL", Status.FAILED), ("ERROR", Status.ERROR)):
        if line.endswith(f" ... {word}"):
            results[line.split(f" ... {word}")[0]] = status
        if line.startswith(f"{word}:") and len(line.split()) > 1:
            results[line.split()[1]] = status


def parse_log_sympy(log: str) -> Results:
    """Return the tests of sympy's `bin/test`, as swebench does."""
    results: Results = {}
    for match in re.finditer(r"(_*) (.*)\.py:(.*) (_*)", log):
        results[f"{match[2]}.py:{match[3]}"] = Status.FAILED
    ends = {" E": Status.ERROR, " F": Status.FAILED, " ok": Status.PASSED}
    for raw in lines_of(log):
        line = raw.strip()
        for end, status in ends.items():
            if line.startswith("test_") and line.endswith(end):
                results[line.split()[0]] = status
    return results


def parse_r2e(log: str) -> Results:
    """Return pytest's results by the names of R2E-Gym and SWE-Next: without the file's path.

    Their maps know passed, failed and broken tests only.
    """
    kept = (Status.PASSED, Status.FAILED, Status.ERROR)
    return gather(
        (name.split("::", 1)[1] if "::" in name else name, status)
        for name, status in summary_of_first(log).items()
        if status in kept
    )
