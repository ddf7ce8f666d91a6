"""Read the logs of Jest, Vitest, Mocha and TAP."""

from __future__ import annotations

import re
from collections.abc import Iterator

from evaluators.parsers.base import Results, Status, clean, gather

_MARKS = {
    "✓": Status.PASSED,
    "✔": Status.PASSED,
    "√": Status.PASSED,
    "✕": Status.FAILED,
    "✖": Status.FAILED,
    "×": Status.FAILED,
    "✗": Status.FAILED,
    "○": Status.SKIPPED,
    "↓": Status.SKIPPED,
    "✎": Status.SKIPPED,
}
_CASE = re.compile(rf"^(?P<indent>\s*)(?P<mark>[{''.join(_MARKS)}]) +(?P<name>.+)$")
_NUMBERED = re.compile(r"^(?P<indent>\s+)\d+\) (?P<name>.+)$")
_TIME = re.compile(r" *(?:\(\d[\d.]* ?m?s\)|\b\d[\d.]* ?m?s)$")
_SUITE = re.compile(r"^(?P<indent>\s{2,})(?P<name>\S.*)$")
_WORDS = re.compile(r"^(skipped|todo) ")
_FILE = re.compile(r"^(PASS|FAIL) (\S+)")
_MOCHA_END = re.compile(r"^ *\d+ passing\b", re.MULTILINE)


def parse_jest(log: str) -> Results:
    """Return Jest's `--verbose` tests twice: by title, and as `suite > title`.

    Titles repeat across suites: by title alone a test is as good as the worst of that title.
    """
    return gather(_tree(clean(log)))


def parse_vitest(log: str) -> Results:
    """Return Vitest's verbose tests as it prints them (`file > suite > title`), and by title."""

    def told() -> Iterator[tuple[str, Status]]:
        for line in clean(log).split("\n"):
            match = _CASE.match(line)
            if match:
                name = re.sub(r" \[skipped\]$", "", _untimed(match["name"]))
                status = _MARKS[match["mark"]]
                yield name, status
                if " > " in name:
                    yield name.rsplit(" > ", 1)[1], status

    return gather(told())


def parse_mocha(log: str) -> Results:
    """Return the tests of Mocha's `spec` reporter by title, and as `suite > title`."""
    text = clean(log)
    end = _MOCHA_END.search(text)
    return gather(_tree(text[: end.start()] if end else text, numbered=True))


def _tree(text: str, *, numbered: bool = False) -> Iterator[tuple[str, Status]]:
    suites: list[tuple[int, str]] = []
    for line in text.split("\n"):
        match = _CASE.match(line) or (_NUMBERED.match(line) if numbered else None)
        suite = _SUITE.match(line)
        if match:
            indent = len(match["indent"])
            status = _MARKS[match["mark"]] if "mark" in match.groupdict() else Status.FAILED
            name = _WORDS.sub("", _untimed(match["name"]))
            above = [title for depth, title in suites if depth < indent]
            yield name, status
            if above:
                yield " > ".join([*above, name]), status
        elif suite:
            indent = len(suite["indent"])
            suites = [entry for entry in suites if entry[0] < indent]
            suites.append((indent, suite["name"].strip()))
        elif line.strip():
            suites = []


def _untimed(name: str) -> str:
    return _TIME.sub("", name).strip()


def _by_line(log: str, pattern: str, statuses: dict[str, Status]) -> Results:
    """Return swebench's way: the last line of a name counts."""
    results: Results = {}
    for line in log.split("\n"):
        if match := re.match(pattern, line.strip()):
            results[match[2].strip()] = statuses[match[1]]
    return results


def parse_log_jest(log: str) -> Results:
    """Return Jest's tests by title, as swebench does."""
    return _by_line(log, r"^\s*(✓|✕|○)\s(.+?)(?:\s\((\d+\s*m?s)\))?$", _MARKS)


def parse_log_vitest(log: str) -> Results:
    """Return Vitest's tests, as swebench does."""
    return _by_line(log, r"^\s*(✓|×|↓)\s(.+?)(?:\s(\d+\s*m?s?|\[skipped\]))?$", _MARKS)


def parse_log_jest_json(log: str) -> Results:
    """Return the lines `[PASSED] name` that SWE-bench makes of Jest's JSON."""
    statuses = {"PASSED": Status.PASSED, "FAILED": Status.FAILED}
    return _by_line(log, r"^\[(PASSED|FAILED)\]\s(.+)$", statuses)


def parse_log_tap(log: str) -> Results:
    """Return the tests of a TAP stream without their numbers, as swebench does."""
    results: Results = {}
    for line in log.split("\n"):
        if match := re.match(r"^(ok|not ok) (\d+) (.+)$", line.strip()):
            results[match[3]] = Status.PASSED if match[1] == "ok" else Status.FAILED
    return results


def parse_log_carbon(log: str) -> Results:
    """Return files by Jest's `PASS file` and `FAIL file`, without times, as swebench does."""
    results: Results = {}
    for line in log.split("\n"):
        if match := re.match(r"^(PASS|FAIL)\s(.*?)(?:\s\([\d.]+ ?m?s\).*)?$", line):
            results[match[2]] = Status.PASSED if match[1] == "PASS" else Status.FAILED
    return results
