"""Multiple choice: which letter does a text state?"""

from __future__ import annotations

from typing import Any

import pytest

from evaluators.base import Artefacts, InvalidSettings, Score
from evaluators.choice import ChoiceEvaluator

CHOICE = ChoiceEvaluator()
CAPITALS = {"A": "London", "B": "Paris", "C": "A dog", "D": "None of these"}


def score(
    text: str | None, answer: object = "C", payload: dict[str, Any] | None = None, **settings: Any
) -> Score:
    """Score a text after checking the settings, as the child process does."""
    whole = {"answer": answer, **(payload or {})}
    CHOICE.validate(settings, whole)
    return CHOICE.score(settings, whole, Artefacts(answer=text))


@pytest.mark.parametrize(
    "text",
    [
        "C",
        "c",
        "(C)",
        "C.",
        "**C**",
        r"\boxed{C}",
        r"\boxed{\text{C}}",
        r"\boxed{\textbf{(C)}}",
        r"$\boxed{\mathrm{C}}$",
        r"\boxed{C. 12 metres}",
        "Answer: C",
        "answer: c",
        "Answer: (C)",
        "**Answer:** C",
        "**Answer: C**",
        "The answer is C.",
        "The correct answer is (C) because A is too small",
        "Final Answer: C) 12 metres",
        "Answer: \\boxed{C}",
        "I choose option C",
        "Choice (C) is right.",
        "Thus the answer is choice C.",
        "A is too small, B too large.\n\n**C**",
        "First A. Then B.\nC. 12 metres",
        "Answer: A\nWait, that is wrong.\nAnswer: C",
        r"\boxed{A}? No. \boxed{C}",
        r"The question says: answer in \boxed{}. So \boxed{C}",
        "<think>Answer: A</think>Answer: C",
        "Is it A or B? Neither. Answer: C",
        "Options: A. x\nB. y\nC. z\nD. w\nAnswer: C",
    ],
)
def test_the_letter_is_found(text: str) -> None:
    result = score(text)
    assert (result.reward, result.details["letters"]) == (1.0, ["C"]), result.details


@pytest.mark.parametrize(
    ("text", "letters"),
    [
        ("Answer: A", ["A"]),
        ("Answer: C\nOn reflection, answer: A", ["A"]),
        ("Answer: C or D", ["C", "D"]),
        ("Answer: either C or D", []),
        (r"\boxed{C, D}", ["C", "D"]),
        (r"\boxed{CD}", ["C", "D"]),
        ("Answer: C or maybe D", ["C"]),
        ("", []),
        (None, []),
        ("I do not know.", []),
        ("Certainly", []),
        ("Answer: Z", []),
    ],
)
def test_what_is_not_that_letter_alone_is_wrong(text: str | None, letters: list[str]) -> None:
    result = score(text)
    assert (result.reward, result.details["letters"]) == (0.0, letters)


def test_a_hedge_is_told() -> None:
    result = score("Answer: C or D")
    assert (result.details["hedged"], result.rewards["format"]) == (True, 0.0)
    assert score("Answer: C or maybe D").details["hedged"] is True


def test_no_answer_is_told_from_a_wrong_one() -> None:
    assert score("", unanswered_reward=-1).reward == -1.0
    assert score("Answer: A", unanswered_reward=-1, incorrect_reward=-0.5).reward == -0.5


@pytest.mark.parametrize(
    ("text", "letters"),
    [
        ("Answer: Paris", ["B"]),
        ("Answer: paris.", ["B"]),
        (r"\boxed{\text{Paris}}", ["B"]),
        ("Answer: A dog", ["C"]),
        ("Paris", ["B"]),
        ("<choice>Paris</choice>", ["B"]),
        ("<answer>D</answer>", ["D"]),
        ("Answer: B. Paris", ["B"]),
        ("Answer: none of these", ["D"]),
        ("Answer: Rome", []),
        ("Answer: E", []),
    ],
)
def test_an_options_text_is_its_letter(text: str, letters: list[str]) -> None:
    assert score(text, "B", {"options": CAPITALS}).details["letters"] == letters


@pytest.mark.parametrize(
    "options",
    [
        ["London", "Paris", "A dog", "None of these"],
        [{"A": "London"}, {"B": "Paris"}, {"C": "A dog"}, {"D": "None of these"}],
        CAPITALS,
    ],
)
@pytest.mark.parametrize("answer", ["B", "b", "(B)", "Paris"])
def test_options_and_answers_come_in_several_forms(options: Any, answer: str) -> None:
    assert score("Answer: Paris", answer, {"options": options}).reward == 1.0


def test_permuted_options_are_read_in_the_order_that_the_agent_saw() -> None:
    shown = {"options": ["Paris", "London"]}
    assert score("Answer: A", "Paris", shown).reward == 1.0
    assert score("Answer: B", "Paris", shown).reward == 0.0


def test_two_options_with_one_text_are_no_letter() -> None:
    assert score("Answer: x", "A", {"options": ["x", "x"]}).details["letters"] == []


def test_of_several_right_answers_any_or_all_are_wanted() -> None:
    assert score("Answer: C", ["A", "C"]).reward == 1.0
    assert score("Answer: A, C", ["A", "C"]).reward == 0.0
    assert score("Answer: A, C", ["A", "C"], several="all").reward == 1.0
    assert score("Answer: C and A", ["A", "C"], several="all").reward == 1.0
    assert score("Answer: A or C", ["A", "C"], several="all").reward == 0.0
    assert score("Answer: C", ["A", "C"], several="all").reward == 0.0
    assert score(r"\boxed{AC}", ["A", "C"], several="all").reward == 1.0


@pytest.mark.parametrize(
    ("settings", "text", "reward"),
    [
        ({"format": "boxed"}, "Answer: C", 0.0),
        ({"format": "boxed"}, r"\boxed{C}", 1.0),
        ({"format": "answer_line"}, r"\boxed{C}", 0.0),
        ({"format": "pattern", "pattern": r"<final>(\w)</final>"}, "<final>C</final>", 1.0),
        ({"format": "pattern", "pattern": r"<final>(\w)</final>"}, "Answer: C", 0.0),
        ({"pattern": r"my pick: (\w)"}, "Answer: A\nmy pick: C", 1.0),
        ({"letters": "AB", "format": "any"}, "Answer: C", None),
    ],
)
def test_the_format_says_what_counts(
    settings: dict[str, Any], text: str, reward: float | None
) -> None:
    if reward is None:
        with pytest.raises(InvalidSettings, match="letters AB"):
            score(text, **settings)
    else:
        assert score(text, **settings).reward == reward


@pytest.mark.parametrize(
    ("settings", "payload", "word"),
    [
        ({"letter": "AB"}, {"answer": "A"}, "letter"),
        ({"letters": "AA"}, {"answer": "A"}, "letters"),
        ({"letters": "ab"}, {"answer": "A"}, "letters"),
        ({"format": "pattern"}, {"answer": "A"}, "pattern"),
        ({"pattern": "a"}, {"answer": "A"}, "group"),
        ({"pattern": "("}, {"answer": "A"}, "wrong"),
        ({}, {"answer": "Q"}, "'Q' is neither"),
        ({}, {"answer": "A", "options": []}, "options"),
        ({}, {"answer": "A", "options": {"AB": "x"}}, "options"),
        ({}, {"answer": "A", "options": ["x"] * 27}, "options"),
        ({}, {"answer": "C", "options": ["x", "y"]}, "'C' is neither"),
        ({}, {}, "answer"),
    ],
)
def test_a_wrong_setting_is_named(
    settings: dict[str, Any], payload: dict[str, Any], word: str
) -> None:
    with pytest.raises(InvalidSettings, match=word):
        CHOICE.validate(settings, payload)


def test_a_long_text_of_statements_takes_no_long_time() -> None:
    assert score("Answer: " * 100_000 + "\\boxed{" * 100_000).reward == 0.0
