"""Exact and regular-expression evaluators."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from evaluators.answers import Normalisation
from evaluators.base import Artefacts, InvalidSettings, RewardMalformed, Score
from evaluators.exact import ExactEvaluator
from evaluators.regex import RegexEvaluator

EXACT, REGEX = ExactEvaluator(), RegexEvaluator()


def exact(
    settings: dict[str, Any], expected: object, answer: str | None, last_message: str = ""
) -> Score:
    """Score one answer after checking the settings, as the child process does."""
    payload = {"answer": expected}
    EXACT.validate(settings, payload)
    artefacts = Artefacts(answer=answer, last_message=last_message)
    return EXACT.score(settings, payload, artefacts)


def regex(settings: dict[str, Any], payload: dict[str, Any], text: str) -> Score:
    """Score one text after checking the settings."""
    REGEX.validate(settings, payload)
    return REGEX.score(settings, payload, Artefacts(answer=text))


@pytest.mark.parametrize(
    ("settings", "expected", "answer", "reward"),
    [
        ({}, "42", "42", 1.0),
        ({}, "42", " 42\n", 1.0),
        ({"strip": False}, "42", "42\n", 0.0),
        ({}, "42", "43", 0.0),
        ({}, "Paris", "paris", 0.0),
        ({"casefold": True}, "Straße", "STRASSE", 1.0),
        ({}, "a b", "a  b", 0.0),
        ({"collapse_whitespace": True}, "a b", "a \t\n b", 1.0),
        ({}, "Paris", "Paris.", 0.0),
        ({"strip_punctuation": True}, "Paris", "«Paris».", 0.0),
        ({"strip_punctuation": True}, "Paris", '"Paris."', 1.0),
        ({"articles": True}, "Eiffel Tower", "the Eiffel Tower", 1.0),
        ({"articles": True, "collapse_whitespace": True}, "end of day", "The end of a day", 1.0),
        ({"articles": True}, "theatre", "atre", 0.0),
        ({}, "Eiffel Tower", "the Eiffel Tower", 0.0),
        ({"numeric": True}, 7, "7.00", 1.0),
        ({"numeric": True}, "1000", "1,000", 1.0),
        ({"numeric": True}, "0.1", "0.10000000000000001", 0.0),
        ({"numeric": True}, "7", "seven", 0.0),
        ({"numeric": True}, "nan", "NaN", 0.0),
        ({}, ["a", "b"], "b", 1.0),
        ({}, ["a", "b"], "ab", 0.0),
        ({"correct_reward": 2, "incorrect_reward": -1}, "a", "b", -1.0),
        ({"correct_reward": 2, "incorrect_reward": -1}, "a", "a", 2.0),
        ({}, "é", "e\u0301", 1.0),
    ],
)
def test_exact(settings: dict[str, Any], expected: object, answer: str, reward: float) -> None:
    assert exact(settings, expected, answer).reward == reward


def test_exact_says_what_was_given() -> None:
    score = exact({}, "42", " 41 ")
    assert score == Score(
        reward=0.0,
        rewards={"reward": 0.0, "accuracy": 0.0},
        details={"given": "41", "correct": False},
        log="given '41'",
    )


@pytest.mark.parametrize(
    ("source", "answer", "last_message", "reward"),
    [
        ("answer", None, "42", 0.0),
        ("answer", "42", "", 1.0),
        ("last_message", "41", "42", 1.0),
        ("answer_or_last_message", None, "42", 1.0),
        ("answer_or_last_message", "41", "42", 0.0),
        ("answer_or_last_message", "", "42", 0.0),
        ("answer_or_last_message", None, "", 0.0),
    ],
)
def test_source_chooses_the_text(
    source: str, answer: str | None, last_message: str, reward: float
) -> None:
    assert exact({"source": source}, "42", answer, last_message).reward == reward


@pytest.mark.parametrize(
    ("settings", "payload", "word"),
    [
        ({"stripp": True}, {"answer": "a"}, "stripp"),
        ({"strip": 1}, {"answer": "a"}, "strip"),
        ({"source": "thoughts"}, {"answer": "a"}, "source"),
        ({"correct_reward": "1"}, {"answer": "a"}, "correct_reward"),
        ({"correct_reward": float("nan")}, {"answer": "a"}, "correct_reward"),
        ({"correct_reward": 10**400}, {"answer": "a"}, "correct_reward"),
        ({}, {}, "answer"),
        ({}, {"answer": []}, "answer"),
        ({}, {"answer": {"a": 1}}, "answer"),
        ({}, {"answer": True}, "answer"),
    ],
)
def test_exact_names_the_wrong_setting(
    settings: dict[str, Any], payload: dict[str, Any], word: str
) -> None:
    with pytest.raises(InvalidSettings, match=word) as caught:
        EXACT.validate(settings, payload)
    assert caught.value.code == "evaluator.settings_invalid"


flags = st.fixed_dictionaries(
    {
        name: st.booleans()
        for name in ("strip", "casefold", "collapse_whitespace", "strip_punctuation", "articles")
    }
)


edges = st.text(alphabet="a .,:\t\n\u0301\u0345\u2003\u00df\u0130", max_size=10)


@given(text=st.text(max_size=60) | edges, chosen=flags)
@example(
    text="0 :",
    chosen={
        "strip": False,
        "casefold": False,
        "collapse_whitespace": True,
        "strip_punctuation": True,
    },
)
def test_normal_form_is_stable(text: str, chosen: dict[str, bool]) -> None:
    rule = Normalisation(**chosen)
    once = rule.apply(text)
    assert rule.apply(once) == once


@given(left=st.text(max_size=30), right=st.text(max_size=30), chosen=flags)
def test_equality_is_symmetric_and_reflexive(
    left: str, right: str, chosen: dict[str, bool]
) -> None:
    rule = Normalisation(**chosen, numeric=True)
    assert rule.equal(left, left)
    assert rule.equal(left, right) == rule.equal(right, left)


@given(number=st.integers(-(10**12), 10**12), decimals=st.integers(0, 5))
def test_numbers_of_equal_value_are_equal(number: int, decimals: int) -> None:
    rule = Normalisation(numeric=True)
    written = f"{number:,}" + ("." + "0" * decimals if decimals else "")
    assert rule.equal(written, str(number))
    assert not rule.equal(written, str(number + 1))


@pytest.mark.parametrize(
    ("settings", "payload", "text", "reward"),
    [
        ({"pattern": r"\d+"}, {}, "it is 7", 1.0),
        ({"pattern": r"\d+"}, {}, "it is seven", 0.0),
        ({"pattern": r"-?\d+", "take": "last"}, {"answer": 7}, "3 + 4 = 7", 1.0),
        ({"pattern": r"-?\d+", "take": "first"}, {"answer": 7}, "3 + 4 = 7", 0.0),
        ({"pattern": r"Answer: (\w+)"}, {"answer": "B"}, "So.\nAnswer: B", 1.0),
        ({"pattern": r"(\w+) or (?P<it>\w+)", "group": "it"}, {"answer": "b"}, "a or b", 1.0),
        ({"pattern": r"(\w+) or (\w+)", "group": 0}, {"answer": "a or b"}, "a or b", 1.0),
        ({"pattern": "yes"}, {}, "YES", 0.0),
        ({"pattern": "yes", "flags": ["IGNORECASE"]}, {}, "YES", 1.0),
        ({"pattern": "yes"}, {}, "oh yes", 1.0),
        ({"pattern": "yes", "mode": "fullmatch"}, {}, "oh yes", 0.0),
        ({"pattern": "no"}, {"pattern": "yes"}, "yes", 1.0),
        ({"pattern": "(a)|b"}, {"answer": "a"}, "b", 0.0),
    ],
)
def test_regex(settings: dict[str, Any], payload: dict[str, Any], text: str, reward: float) -> None:
    assert regex(settings, payload, text).reward == reward


@pytest.mark.parametrize(
    ("settings", "payload", "word"),
    [
        ({}, {}, "pattern"),
        ({"pattern": "("}, {}, "pattern"),
        ({"pattern": "a", "group": 1}, {}, "group"),
        ({"pattern": "a", "group": "x"}, {}, "group"),
        ({"pattern": "a", "group": True}, {}, "group"),
        ({"pattern": "a", "flags": "IGNORECASE"}, {}, "flags"),
        ({"pattern": "a", "flags": ["LOUD"]}, {}, "flags"),
        ({"pattern": "a", "take": "second"}, {}, "take"),
        ({"pattern": "a", "mode": "match"}, {}, "mode"),
        ({"pattern": "a", "patern": "b"}, {}, "patern"),
        ({"pattern": "a"}, {"answer": None}, "answer"),
    ],
)
def test_regex_names_the_wrong_setting(
    settings: dict[str, Any], payload: dict[str, Any], word: str
) -> None:
    with pytest.raises(InvalidSettings, match=word):
        REGEX.validate(settings, payload)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_score_is_finite(value: float) -> None:
    with pytest.raises(RewardMalformed):
        Score(reward=value, rewards={})
    with pytest.raises(RewardMalformed):
        Score(reward=0.0, rewards={"style": value})
