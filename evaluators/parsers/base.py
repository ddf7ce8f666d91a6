"""What a parser of test logs returns, and how results of one test are put together."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum

_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")


class Status(StrEnum):
    """Say what became of a test, in the words of pytest and swebench."""

    PASSED = "PASSED"
    FAILED = "FAILED"
    ERROR = "ERROR"
    SKIPPED = "SKIPPED"
    XFAIL = "XFAIL"  # failed, as its author expects: swebench counts it as passed
    XPASS = "XPASS"  # passed although its author expects a failure


Results = dict[str, Status]
Parser = Callable[[str], Results]

# A test that is told of twice is as good as the worse: output that the code under test prints
# cannot outdo the runner's own words on a failure.
_BADNESS = (
    Status.XPASS,
    Status.PASSED,
    Status.XFAIL,
    Status.SKIPPED,
    Status.FAILED,
    Status.ERROR,
)


def gather(told: Iterable[tuple[str, Status]]) -> Results:
    """Return each test's worst status."""
    results: Results = {}
    for name, status in told:
        before = results.get(name)
        if before is None or _BADNESS.index(status) > _BADNESS.index(before):
            results[name] = status
    return results


def clean(log: str) -> str:
    """Return a log without terminal codes and carriage returns at line ends."""
    return _ANSI.sub("", log).replace("\r\n", "\n")


def lines_of(log: str) -> Iterator[str]:
    """Yield the lines; only line feeds end one, as test names may hold other separators."""
    yield from clean(log).split("\n")
