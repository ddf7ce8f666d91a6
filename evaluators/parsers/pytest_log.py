"""Read pytest's log: the short summary of `-rA`, and the lines of `-v`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from evaluators.parsers.base import Results, Status, clean, gather

_SUMMARY = re.compile(r"^(PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS) +(.+)$")
# `path::test PASSED [ 12%]`; a line of pytest-xdist has the worker first and the status before.
_VERBOSE = re.compile(
    r"^(?P<name>\S+\.\w+::.+?) (?P<status>PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)"
    r"(?: \(.*\))?(?: +\[ *\d+%\])?$"
)
_WORKER = re.compile(
    r"^\[gw\d+\](?: \[ *\d+%\])? (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS) (\S+\.\w+::.+?) *$"
)
_COUNT = re.compile(r"\[\d+\]")


def parse_pytest(log: str) -> Results:
    """Return node ids in full, parameters with spaces included.

    All of the log is read, and of a test that is told of twice the worse counts: what the code
    under test prints, in pytest's captured output or after its summary, hides no failure.
    """
    return gather(_everything(clean(log)))


def summary_of_first(log: str) -> Results:
    """Return what stands from the first short summary on, as R2E-Gym reads it."""
    parts = clean(log).split("short test summary info", 1)
    return gather(_summary(parts[-1]))


def _everything(text: str) -> Iterator[tuple[str, Status]]:
    yield from _summary(text)
    for line in text.split("\n"):
        if match := _VERBOSE.match(line):
            yield match["name"], Status(match["status"])
        elif match := _WORKER.match(line):
            yield match[2], Status(match[1])


def _summary(text: str) -> Iterator[tuple[str, Status]]:
    for line in text.split("\n"):
        match = _SUMMARY.match(line)
        if match and not (match[1] == "SKIPPED" and _COUNT.match(match[2])):
            yield _without_reason(match[2].rstrip()), Status(match[1])


def _without_reason(text: str) -> str:
    """Cut ` - reason` off, but not what looks like it inside a parameter's brackets."""
    start = 0
    while (end := text.find(" - ", start)) >= 0:
        if text[:end].count("[") <= text[:end].count("]"):
            return text[:end]
        start = end + 1
    return text


# swebench's own functions of these names, case by case: its data sets' lists of tests were made
# with them and hold their oddities, such as names cut at the first space.
_STATUSES = ("FAILED", "PASSED", "SKIPPED", "ERROR", "XFAIL")
_OPTION = re.compile(r"(.*?)\[(.*)\]")


def parse_log_pytest(log: str) -> Results:
    """Return the second word of each line that begins with a status, as swebench does."""
    return _first_words(log, str)


def parse_log_pytest_options(log: str) -> Results:
    """Return as `parse_log_pytest`, with a path in the brackets cut to its last part."""
    return _first_words(log, _cut_option)


def parse_log_matplotlib(log: str) -> Results:
    """Return as `parse_log_pytest`, with mouse buttons by number."""
    return _first_words(log.replace("MouseButton.LEFT", "1").replace("MouseButton.RIGHT", "3"), str)


def parse_log_pytest_v2(log: str) -> Results:
    """Return all words after the status, or before one that ends the line."""
    results: Results = {}
    for raw in log.split("\n"):
        line = re.sub(r"\[(\d+)m", "", raw).translate(dict.fromkeys(range(1, 32)))
        if line.startswith(_STATUSES):
            if line.startswith("FAILED"):
                line = line.split(" - ", 1)[0]
            words = line.split()
            if len(words) >= 2 and not _is_count(words):
                _put(results, " ".join(words[1:]), words[0])
        elif line.endswith(_STATUSES):
            words = line.split()
            if len(words) >= 2:
                _put(results, " ".join(words[:-1]), words[-1])
    return results


def parse_log_seaborn(log: str) -> Results:
    """Return FAILED and PASSED tests, whichever side of the name the word is on."""
    results: Results = {}
    for line in log.split("\n"):
        words = line.split()
        if len(words) < 2:
            continue
        if line.startswith("FAILED"):
            results[words[1]] = Status.FAILED
        elif " PASSED " in line:
            if words[1] == "PASSED":
                results[words[0]] = Status.PASSED
        elif line.startswith("PASSED"):
            results[words[1]] = Status.PASSED
    return results


def _first_words(log: str, rename: Callable[[str], str]) -> Results:
    results: Results = {}
    for raw in log.split("\n"):
        line = raw
        if not line.startswith(_STATUSES):
            continue
        if line.startswith("FAILED"):
            line = line.replace(" - ", " ")
        words = line.split()
        if len(words) > 1 and not _is_count(words):
            _put(results, rename(words[1]), words[0])
    return results


def _put(results: Results, name: str, word: str) -> None:
    if word in _STATUSES:  # swebench also keeps words that only begin with one, which count nothing
        results[name] = Status(word)


def _is_count(words: list[str]) -> bool:
    return words[0] == "SKIPPED" and _COUNT.fullmatch(words[1]) is not None


def _cut_option(name: str) -> str:
    match = _OPTION.search(name)
    if match is None:
        return name
    main, option = match.groups()
    if option.startswith("/") and not option.startswith("//") and "*" not in option:
        option = "/" + option.split("/")[-1]
    return f"{main}[{option}]"
