"""Find an evaluator by the name that an environment gives, plug-ins included."""

from __future__ import annotations

import inspect

from evaluators.base import Evaluator, InvalidSettings, UnknownEvaluator
from evaluators.choice import ChoiceEvaluator
from evaluators.code import CodeEvaluator
from evaluators.composite import CompositeEvaluator
from evaluators.exact import ExactEvaluator
from evaluators.json_schema import JsonSchemaEvaluator
from evaluators.judge import JudgeEvaluator
from evaluators.math import MathEvaluator
from evaluators.plugins import PluginRegistry
from evaluators.process import ProcessEvaluator
from evaluators.regex import RegexEvaluator
from evaluators.script import ScriptEvaluator
from evaluators.swe import SweEvaluator

ENTRY_POINTS = "prorl.evaluators"
BUILT_IN = (
    ChoiceEvaluator,
    CodeEvaluator,
    CompositeEvaluator,
    ExactEvaluator,
    JsonSchemaEvaluator,
    JudgeEvaluator,
    MathEvaluator,
    ProcessEvaluator,
    RegexEvaluator,
    ScriptEvaluator,
    SweEvaluator,
)
MAX_NAME = 64
_ATTRIBUTES = (
    ("name", str),
    ("description", str),
    ("version", str),
    ("needs_sandbox", bool),
    ("needs_messages", bool),
)


class EvaluatorRegistry(PluginRegistry[Evaluator]):
    """Map names to evaluators."""

    kind = "evaluator"
    setting = "EVALUATORS"
    invalid = InvalidSettings
    built_in = BUILT_IN

    def __init__(self, group: str = ENTRY_POINTS) -> None:
        super().__init__(group)

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
