"""Show the measures as tables, and keep them as JSON and Markdown."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.sandbox.goals import Verdict
from benchmarks.sandbox.measures import Measure

_LEGEND = (
    "Cells: median / p95 of the samples, and the median's ratio to the section's first row "
    "that has the subject. Ways of a section take turns in random order, in one run."
)
_MOST_COLUMNS = 5  # of subjects; a section with more has them as rows


@dataclass(frozen=True, kw_only=True)
class Report:
    """Hold everything that one run found."""

    machine: dict[str, Any]
    options: dict[str, Any]
    measures: Sequence[Measure]
    verdicts: Sequence[Verdict]
    notes: Sequence[str]

    def as_dict(self) -> dict[str, Any]:
        """Return the report as JSON-able values."""
        return {
            "machine": self.machine,
            "options": self.options,
            "measures": [measure.as_dict() for measure in self.measures],
            "goals": [verdict.as_dict() for verdict in self.verdicts],
            "notes": list(self.notes),
        }


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Hold one table of text: a title, the names of its columns, its rows."""

    title: str
    columns: list[str]
    rows: list[list[str]]


def grids(report: Report) -> list[Grid]:
    """Return one grid per section, ways by subjects, and one of the goals."""
    sections = list(dict.fromkeys(measure.section for measure in report.measures))
    found = [
        _section_grid(name, [m for m in report.measures if m.section == name]) for name in sections
    ]
    rows = [
        [
            verdict.goal.text,
            f"{verdict.goal.relation} {verdict.goal.limit:g}",
            "" if verdict.value is None else _number(verdict.value),
            verdict.word,
        ]
        for verdict in report.verdicts
    ]
    if not rows:
        return found
    return [*found, Grid(title="goals", columns=["goal", "wanted", "here", ""], rows=rows)]


def show(report: Report, console: Console) -> None:
    """Print the tables."""
    for grid in grids(report):
        table = Table(title=grid.title, title_justify="left")
        for number, column in enumerate(grid.columns):
            table.add_column(column, justify="left" if number == 0 else "right")
        for row in grid.rows:
            table.add_row(*row)
        console.print(table)
    for note in report.notes:
        console.print(f"- {note}", markup=False)
    console.print(_LEGEND, markup=False)


def store(report: Report, folder: Path, name: str) -> list[Path]:
    """Write NAME.json and NAME.md into a folder; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.json", folder / f"{name}.md"]
    paths[0].write_text(json.dumps(report.as_dict(), indent=1) + "\n")
    paths[1].write_text(markdown(report, name))
    return paths


def markdown(report: Report, title: str) -> str:
    """Return the report as Markdown."""
    lines = [f"# {title}", ""]
    lines += [f"- {key}: {value}" for key, value in (report.machine | report.options).items()]
    lines += ["", _LEGEND]
    for grid in grids(report):
        lines += ["", f"## {grid.title}", "", _row(grid.columns), _row(["---"] * len(grid.columns))]
        lines += [_row(row) for row in grid.rows]
    if report.notes:
        lines += ["", "## notes", "", *(f"- {note}" for note in report.notes)]
    return "\n".join(lines) + "\n"


def _section_grid(name: str, measures: list[Measure]) -> Grid:
    subjects = list(dict.fromkeys(measure.subject for measure in measures))
    ways = list(dict.fromkeys(measure.way for measure in measures))
    found = {(measure.subject, measure.way): measure for measure in measures}
    bases = {
        subject: next(found[subject, way] for way in ways if (subject, way) in found)
        for subject in subjects
    }
    rows = [
        [way, *(_cell(found.get((subject, way)), bases[subject]) for subject in subjects)]
        for way in ways
    ]
    columns = [f"{subject} ({bases[subject].unit})" for subject in subjects]
    if len(subjects) <= max(len(ways), _MOST_COLUMNS):
        return Grid(title=name, columns=["way", *columns], rows=rows)
    turned = [list(cells) for cells in zip(columns, *(row[1:] for row in rows), strict=True)]
    return Grid(title=name, columns=["", *ways], rows=turned)


def _cell(measure: Measure | None, base: Measure) -> str:
    if measure is None:
        return ""
    text = f"{_number(measure.median)} / {_number(measure.p95)}"
    if base.median == 0:
        return text
    return f"{text} (×{_number(measure.median / base.median)})"


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
