"""Find an evaluator by the name that an environment gives, plug-ins included."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import cache

from evaluators.base import Evaluator, InvalidSettings, UnknownEvaluator
from evaluators.plugins import PluginRegistry, imported

ENTRY_POINTS = "prorl.evaluators"
# By path, as each is imported when it is asked for: a grading's process needs one of them, and
# all together cost it 0.15 s of processor time.
BUILT_IN = {
    "choice": "evaluators.choice.ChoiceEvaluator",
    "code": "evaluators.code.CodeEvaluator",
    "composite": "evaluators.composite.CompositeEvaluator",
    "exact": "evaluators.exact.ExactEvaluator",
    "json_schema": "evaluators.json_schema.JsonSchemaEvaluator",
    "judge": "evaluators.judge.JudgeEvaluator",
    "math": "evaluators.math.MathEvaluator",
    "process": "evaluators.process.ProcessEvaluator",
    "regex": "evaluators.regex.RegexEvaluator",
    "script": "evaluators.script.ScriptEvaluator",
    "swe": "evaluators.swe.SweEvaluator",
}
MAX_NAME = 64
_ATTRIBUTES = (
    ("name", str),
    ("description", str),
    ("version", str),
    ("needs_sandbox", bool),
    ("needs_messages", bool),
)


@cache
def _built_in(name: str) -> Evaluator:
    return _made(imported(BUILT_IN[name]), "the service")


class _BuiltIn:
    """Iterate over the built-in evaluators, imported by that."""

    def __iter__(self) -> Iterator[Evaluator]:
        return map(_built_in, BUILT_IN)


class EvaluatorRegistry(PluginRegistry[Evaluator]):
    """Map names to evaluators."""

    kind = "evaluator"
    setting = "EVALUATORS"
    invalid = InvalidSettings
    built_in = _BuiltIn()

    def __init__(self, group: str = ENTRY_POINTS) -> None:
        super().__init__(group)

    def __getitem__(self, name: str) -> Evaluator:
        """Return what has this name; a built-in one without looking for plug-ins."""
        return _built_in(name) if name in BUILT_IN else super().__getitem__(name)

    def check(self, candidate: object, source: str) -> tuple[str, Evaluator]:
        """Return the evaluator, made if it is a class; raise InvalidSettings."""
        made = _made(candidate, source)
        return made.name, made


EVALUATORS = EvaluatorRegistry()


def get_evaluator(name: str) -> Evaluator:
    """Return the evaluator; raise `UnknownEvaluator` that lists the known and the broken ones."""
    evaluator = EVALUATORS.get(name)
    if evaluator is None:
        broken = "".join(f"; left out: {fault}" for fault in EVALUATORS.faults)
        raise UnknownEvaluator(
            f"no evaluator {name!r}; known are {', '.join(sorted(EVALUATORS))}{broken}"
        )
    return evaluator


def _made(candidate: object, source: str) -> Evaluator:
    if inspect.isclass(candidate) and issubclass(candidate, Evaluator):
        candidate = candidate()
    if not isinstance(candidate, Evaluator):
        raise InvalidSettings(f"{source}: {candidate!r} is no Evaluator")
    for attribute, kind in _ATTRIBUTES:
        value = getattr(candidate, attribute, None)
        if not isinstance(value, kind) or value == "":
            raise InvalidSettings(f"{source}: its {attribute} is {value!r}, not a {kind.__name__}")
    if len(candidate.name) > MAX_NAME:
        raise InvalidSettings(f"{source}: its name is longer than {MAX_NAME} characters")
    return candidate
