"""Read the report that pytest's `--junitxml` writes, of `junit_family=xunit1`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from xml.parsers import expat

from evaluators.parsers.base import Results, Status, gather

_ESCAPED = re.compile(r"#x([0-9A-F]{2,4})")


class ReportUnreadable(Exception):
    """Say that a report is no report."""


def parse_junit(data: bytes) -> Results:
    """Return node ids and statuses; raise `ReportUnreadable`.

    The report is as hostile as the code that ran beside its writer: entities are refused, so it
    cannot grow when it is read.
    """
    cases: list[tuple[dict[str, str], list[tuple[str, str]]]] = []
    parser = expat.ParserCreate()
    parser.buffer_text = True

    def begin(tag: str, attributes: dict[str, str]) -> None:
        if tag == "testcase":
            cases.append((attributes, []))
        elif cases and tag in ("failure", "error", "skipped"):
            cases[-1][1].append((tag, attributes.get("type", "")))

    def refuse(*_: object) -> None:
        raise ReportUnreadable("the report declares entities")

    parser.StartElementHandler = begin
    parser.EntityDeclHandler = refuse
    try:
        parser.Parse(data, True)
    except expat.ExpatError as error:
        raise ReportUnreadable(f"the report is no XML: {error}") from error
    return gather(_told(cases))


def _told(
    cases: list[tuple[dict[str, str], list[tuple[str, str]]]],
) -> Iterator[tuple[str, Status]]:
    for attributes, children in cases:
        name = _node_id(attributes)
        yield name, Status.PASSED if not children else Status.XFAIL
        for tag, kind in children:
            if tag == "skipped":
                yield name, Status.XFAIL if kind == "pytest.xfail" else Status.SKIPPED
            else:
                yield name, Status.FAILED if tag == "failure" else Status.ERROR


def _node_id(attributes: dict[str, str]) -> str:
    """Return `file::Class::name`; what failed to be collected has its file as name alone."""
    name, file = attributes.get("name", ""), attributes.get("file", "")
    group = attributes.get("classname", "")
    module = re.sub(r"\.py$", "", file).replace("/", ".")
    if not file:
        return name if not group else f"{group}::{name}"
    if not group and name == module:
        return file
    rest = group.removeprefix(module).strip(".") if group.startswith(module) else ""
    return "::".join([file, *(rest.split(".") if rest else []), name])


def summary_of(results: Results) -> str:
    """Return results as the short summary of `-rA`, for parsers that read only that."""
    lines = ["=========================== short test summary info ==========================="]
    lines += [f"{status} {name}" for name, status in results.items() if "\n" not in name]
    return "\n".join(lines) + "\n"
