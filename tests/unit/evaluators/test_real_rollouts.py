"""What our evaluators say of answers that real models gave, beside what NeMo Gym's said of them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from evaluators.base import Artefacts
from evaluators.registry import get_evaluator
from tests.nemo_gym import data_files, wheel_file

# Right by their rows' own expected answers, and given in <answer>, as those agents were asked to;
# theirs took a number of the reasoning instead (0 and 63/8).
OURS_ALONE = {
    ("environments/langgraph_orchestrator_math/data/example_rollouts.jsonl", 4): "<answer>32<",
    ("environments/langgraph_rewoo_math/data/example_rollouts.jsonl", 4): r"<answer>\sqrt{2}<",
}


def rollouts() -> Iterator[tuple[tuple[str, int], Mapping[str, Any]]]:
    """Yield the place and the row of every rollout with a response and a reward."""
    for name in data_files():
        for number, line in enumerate(wheel_file(name).splitlines() if "rollout" in name else ()):
            if line.startswith(b"{"):
                row = json.loads(line)
                if isinstance(row.get("response"), dict) and "reward" in row:
                    yield (name, number), row


def last_text(row: Mapping[str, Any]) -> str:
    """Return the last message of the model's."""
    said = [each for each in row["response"].get("output", []) if each.get("type") == "message"]
    content = said[-1].get("content") if said else ""
    if isinstance(content, str):
        return content
    return "".join(str(part.get("text", "")) for part in content or [])


def asked(row: Mapping[str, Any]) -> tuple[str, dict[str, Any], float] | None:
    """Return evaluator, payload and NeMo Gym's reward of a row that we score; None: of another."""
    expected = row.get("expected_answer")
    if expected is not None and "library_reward" in row:
        return "math", {"answer": expected}, row["library_reward"]
    if expected is not None and row.get("options"):
        return "choice", {"answer": expected, "options": row["options"]}, row["reward"]
    return None


def test_real_answers_earn_what_nemo_gyms_verifiers_gave_them() -> None:
    compared: Counter[str] = Counter()
    different = {}
    for place, row in rollouts():
        scoring = asked(row)
        if scoring is None:
            continue
        name, payload, theirs = scoring
        evaluator = get_evaluator(name)
        evaluator.validate({}, payload)
        ours = evaluator.score({}, payload, Artefacts(answer=last_text(row)))
        compared[name] += 1
        if ours.reward != theirs:
            different[place] = (ours.reward, last_text(row)[-40:])
    assert compared == {"math": 105, "choice": 5}
    assert set(different) == set(OURS_ALONE), different
    for place, words in OURS_ALONE.items():
        assert different[place][0] == 1.0
        assert words in different[place][1]
