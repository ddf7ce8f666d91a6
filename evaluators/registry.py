"""Find an evaluator by the name that an environment gives."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from evaluators.base import Evaluator, UnknownEvaluator
from evaluators.exact import ExactEvaluator
from evaluators.regex import RegexEvaluator
from evaluators.script import ScriptEvaluator

EVALUATORS: Mapping[str, Evaluator] = MappingProxyType(
    {
        evaluator.name: evaluator
        for evaluator in (ExactEvaluator(), RegexEvaluator(), ScriptEvaluator())
    }
)


def get_evaluator(name: str) -> Evaluator:
    """Return the evaluator; raise `UnknownEvaluator` that lists the known ones."""
    evaluator = EVALUATORS.get(name)
    if evaluator is None:
        raise UnknownEvaluator(f"no evaluator {name!r}; known are {', '.join(sorted(EVALUATORS))}")
    return evaluator
