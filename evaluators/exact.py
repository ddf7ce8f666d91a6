"""Compare the answer with the accepted ones."""

from __future__ import annotations

from evaluators.answers import NORMALISATION, REWARDS, Normalisation, choose, verdict
from evaluators.base import Artefacts, Evaluator, JsonMap, Score
from evaluators.settings import read_answers, read_number, refuse_unknown


class ExactEvaluator(Evaluator):
    """Pay when the answer equals one of the payload's `answer` after normalisation."""

    name = "exact"
    description = "The answer equals the expected one after normalisation."
    needs_sandbox = False

    def validate(self, settings: JsonMap, payload: JsonMap) -> None:
        """Check names, flags, rewards and the expected answer."""
        refuse_unknown(settings, {"source", *NORMALISATION, *REWARDS}, evaluator=self.name)
        Normalisation.from_settings(settings)
        choose(settings, Artefacts())
        for name in REWARDS:
            read_number(settings, name, 0.0)
        read_answers(payload, evaluator=self.name)

    def reference_answer(self, settings: JsonMap, payload: JsonMap) -> str | None:  # noqa: ARG002
        """Return the first accepted answer."""
        return read_answers(payload, evaluator=self.name)[0]

    def score(self, settings: JsonMap, payload: JsonMap, artefacts: Artefacts) -> Score:
        """Compare; an agent that left no answer is wrong, which is a score and not a fault."""
        rule = Normalisation.from_settings(settings)
        expected = read_answers(payload, evaluator=self.name)
        given = choose(settings, artefacts)
        if given is None:
            return verdict(settings, False, {"given": None}, "the agent left no answer")
        correct = any(rule.equal(given, answer) for answer in expected)
        shown = rule.apply(given)[:1000]
        return verdict(settings, correct, {"given": shown}, f"given {shown!r}")
