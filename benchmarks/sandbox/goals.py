"""What the ratios should be; a goal is printed as met or not met, never enforced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from benchmarks.sandbox import bursts, commands, files, forms, lifecycle, shells
from benchmarks.sandbox.measures import Key, Measure, by_key


@dataclass(frozen=True, kw_only=True)
class Goal:
    """Compare the medians of two measures, or one median alone, with a limit."""

    text: str
    measured: Key
    against: Key | None
    relation: Literal["at most", "at least"]
    limit: float


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Hold a goal's value; None when one of its measures is missing."""

    goal: Goal
    value: float | None

    @property
    def word(self) -> str:
        """Return "met", "not met" or "not measured"."""
        if self.value is None:
            return "not measured"
        if self.goal.relation == "at most":
            return "met" if self.value <= self.goal.limit else "not met"
        return "met" if self.value >= self.goal.limit else "not met"

    def as_dict(self) -> dict[str, Any]:
        """Return the verdict as JSON-able values."""
        return {
            "goal": self.goal.text,
            "relation": self.goal.relation,
            "limit": self.goal.limit,
            "value": None if self.value is None else round(self.value, 4),
            "verdict": self.word,
        }


def _command(subject: str, way: str) -> Key:
    return commands.SECTION, subject, way


def _at_most(text: str, measured: Key, against: Key | None, limit: float) -> Goal:
    return Goal(text=text, measured=measured, against=against, relation="at most", limit=limit)


def _at_least(text: str, measured: Key, against: Key, limit: float) -> Goal:
    return Goal(text=text, measured=measured, against=against, relation="at least", limit=limit)


_SHELL_BUILTIN = _command(commands.BUILTIN, commands.SHELL)
GOALS = (
    _at_most(
        "builtin through a shell : pipe",
        _SHELL_BUILTIN,
        _command(commands.BUILTIN, commands.PIPE),
        2.5,
    ),
    _at_most(
        "external program through a shell : pipe",
        _command(commands.EXTERNAL, commands.SHELL),
        _command(commands.EXTERNAL, commands.PIPE),
        1.2,
    ),
    _at_least(
        "builtin, SWE-ReX as it ships : a shell",
        _command(commands.BUILTIN, commands.SWEREX),
        _SHELL_BUILTIN,
        200,
    ),
    _at_least(
        "builtin, tmux with 0.5 s poll : a shell",
        _command(commands.BUILTIN, commands.TMUX),
        _SHELL_BUILTIN,
        300,
    ),
    _at_most(
        "1.3 MB through a terminal : pipe",
        _command(commands.LARGE, commands.SHELL),
        _command(commands.LARGE, commands.PIPE),
        4,
    ),
    _at_most(
        "1.3 MB through a shell on pipes : pipe",
        _command(commands.LARGE, commands.SHELL_PIPES),
        _command(commands.LARGE, commands.PIPE),
        1.2,
    ),
    _at_most(
        "shell ready : bare nsenter and bash",
        (shells.SECTION, shells.READY, shells.TERMINAL),
        (shells.SECTION, shells.READY, shells.BARE),
        1.5,
    ),
    _at_most(
        "throw-away stop : bare SIGKILL",
        (lifecycle.STOPS, lifecycle.STOP, lifecycle.STOP_OURS),
        (lifecycle.STOPS, lifecycle.STOP, lifecycle.KILL_OURS),
        2,
    ),
    _at_most(
        "hand-out from the warm pool : start",
        (lifecycle.SECTION, lifecycle.ALONE_WARM, forms.OURS_AHEAD),
        (lifecycle.SECTION, lifecycle.ALONE_WARM, forms.OURS),
        1 / 20,
    ),
    _at_most("failures of 64 starts at once", (bursts.SECTION, bursts.FAILED, forms.OURS), None, 0),
    *(
        _at_most(
            f"{job} : unpacked, --writable-tmpfs",
            (files.SECTION, job, forms.OURS),
            (files.SECTION, job, forms.UNPACKED),
            1.3,
        )
        for job in files.JOBS
    ),
)


def judge(measures: Sequence[Measure]) -> list[Verdict]:
    """Return the verdict on every goal whose section was measured."""
    found = by_key(measures)
    sections = {measure.section for measure in measures}
    return [
        Verdict(goal=goal, value=_value(goal, found))
        for goal in GOALS
        if goal.measured[0] in sections
    ]


def _value(goal: Goal, found: Mapping[Key, Measure]) -> float | None:
    measured = found.get(goal.measured)
    if measured is None:
        return None
    if goal.against is None:
        return measured.median
    against = found.get(goal.against)
    return None if against is None else measured.median / against.median
