r"""The math evaluator: golden cases whose naive comparison is wrong, and hostile statements."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest

from evaluators import runner
from evaluators.base import Artefacts, EvaluatorTimeout, InvalidSettings, Score
from evaluators.math import MathEvaluator
from evaluators.math_values import Rounding, quick_verdict, tidy

MATH = MathEvaluator()


def score(text: str | None, gold: object, **settings: Any) -> Score:
    """Score a text after checking the settings, as the child process does."""
    payload = {"answer": gold}
    MATH.validate(settings, payload)
    return MATH.score(settings, payload, Artefacts(answer=text))


RIGHT = [
    # where it is stated
    ("42", r"Hence \boxed{42}."),
    ("42", "The answer is 42."),
    ("42", "The answer is 42 because 6*7=42"),
    ("42", "**Final Answer:** $42$."),
    ("42", "the answer is $x = 42$, as 6 and 7"),
    ("42", "Answer:\n\n42"),
    ("72", "48 / 2 = 24, 48 + 24 = 72\n#### 72"),
    ("3", r"<think>\boxed{4}</think> it is 3"),
    ("2", r"\boxed{1} no, wait: \boxed{2}"),
    ("7", r"The task says: put it in \boxed{}. So \boxed{7}"),
    ("7", r"What is \boxed{?}: 3 + 4. Answer: **7**"),
    ("7", r"\boxed{\boxed{7}}"),
    ("7", r"\fbox{7}"),
    ("5", "Answer: 5\nConfidence: 90%"),
    ("13", "Answer: 12\nNo. Answer: 13"),
    ("32", "10 + 5 + 17 = 32 of these.\n\n<answer>32</answer>"),
    (r"\sqrt{2}", "<answer>\\sqrt{2}</answer>"),
    # numbers
    ("3000", r"\boxed{3,000}"),
    ("3000", r"\boxed{3{,}000}"),
    ("3,000", "Answer: 3000"),
    ("0.5", "Answer: .5"),
    ("1.0", r"\boxed{1}"),
    ("-5", r"\boxed{- 5}"),
    ("-5", "Answer: \u22125"),
    (7, r"\boxed{7.00}"),
    ("1/2", r"\boxed{\frac12}"),
    (r"\frac{1}{2}", "The answer is 0.5."),
    (r"\frac{1}{2}", r"\boxed{\dfrac{1}{2}}"),
    ("1", r"\boxed{\frac{2}{2}}"),
    ("1/3", r"\boxed{0.333333}"),
    (r"1 \frac{1}{2}", r"\boxed{1.5}"),
    ("10^{10}", r"\boxed{10000000000}"),
    (r"50\%", r"\boxed{50\%}"),
    (r"50\%", r"\boxed{0.5}"),
    ("5", r"\boxed{\$5.00}"),
    # units
    ("10", r"\boxed{10\text{ cm}}"),
    ("10 cm", r"\boxed{10}"),
    ("10", r"\boxed{10 \, \mathrm{m/s}}"),
    ("90", r"\boxed{90^\circ}"),
    ("11", r"\boxed{\text{11 apples}}"),
    ("10", "Answer: 10 km^2"),
    ("7", "Answer: x = 3 + 4 = 7 apples"),
    (r"x \neq 5", r"\boxed{x \ne 5}"),
    # expressions
    ("x^2+2x+1", r"\boxed{(x+1)^2}"),
    (r"\sqrt{8}", r"\boxed{2\sqrt{2}}"),
    (r"\frac{\pi}{4}", r"\boxed{\pi/4}"),
    (r"\frac{\sqrt{3}}{3}", r"\boxed{\frac{1}{\sqrt{3}}}"),
    (r"\frac{1}{x}", r"\boxed{x^{-1}}"),
    (r"\binom{5}{2}", r"\boxed{10}"),
    ("5!", r"\boxed{120}"),
    (r"\boxed{nRT\ln(V_2/V_1)}", r"\boxed{nRT \ln\left(\frac{V_2}{V_1}\right)}"),
    (
        r"\(\frac{(3-\sqrt{3})(2-\sqrt{3})^{2016}+(3+\sqrt{3})(2+\sqrt{3})^{2016}}{6}\)",
        r"\boxed{x = \frac{(\sqrt{3}+1)^{4033} + (\sqrt{3}-1)^{4033}}{2^{2017}\sqrt{3}}}",
    ),
    ("3+4i", r"\boxed{4i+3}"),
    ("x=5", r"\boxed{5}"),
    ("5", r"\boxed{x=5}"),
    ("12", r"\boxed{x = 3*4 = 12}"),
    # sets, intervals, tuples, vectors
    ("{5,6}", r"\boxed{5,6}"),
    ("5,6", r"\boxed{6,5}"),
    (r"\{1,2,3\}", r"\boxed{\{3,2,1\}}"),
    ("1,2", r"\boxed{1 \text{ and } 2}"),
    ("x=1 or x=2", r"\boxed{x=2 \text{ or } x=1}"),
    ("[0,1)", r"\boxed{0 \le x < 1}"),
    (r"x \in (1,2)", r"\boxed{(1,2)}"),
    (r"(-\infty,1)\cup(2,\infty)", r"\boxed{(2,\infty)\cup(-\infty,1)}"),
    (
        r"\begin{pmatrix}1\\2\end{pmatrix}",
        r"\boxed{\begin{pmatrix} 1 \\ 2 \end{pmatrix}}",
    ),
    (r"0.5", r"\boxed{\frac12 \text{ or } 0.5}"),
    # words
    (r"\text{Monday}", r"\boxed{Monday}"),
    (r"\text{no solution}", r"\boxed{\text{no solution}}"),
    (r"\text{(C)}", r"\boxed{C}"),
    (["1/3", "2/3"], r"\boxed{\frac{2}{3}}"),
    (r"We see that \boxed{8}.", r"\boxed{8}"),
    ("12 + 60 = 72\n#### 72", r"\boxed{72}"),
]
WRONG = [
    ("5", r"\boxed{5 or 6}"),
    ("6", r"\boxed{5 or 6}"),
    ("6", r"\boxed{5 \text{ or } 6}"),
    ("6", "Answer: 5 or 6"),
    ("6", r"\boxed{5, 6}"),
    ("6", r"\boxed{\{5,6\}}"),
    ("1", r"\boxed{1} no, wait: \boxed{2}"),
    ("(1,2)", r"\boxed{(2,1)}"),
    ("[0,1)", r"\boxed{(0,1)}"),
    ("x=5", r"\boxed{y=5}"),
    ("x^2+1", r"\boxed{x^2-1}"),
    ("-5", r"\boxed{5}"),
    ("16", r"\boxed{16\pi}"),
    ("1/3", r"\boxed{0.33}"),
    (r"\pi", r"\boxed{3.14}"),
    ("1e-9", r"\boxed{0}"),
    ("1234567", r"\boxed{1234568}"),
    ("100000000000000000000000001", r"\boxed{100000000000000000000000000}"),
    ("5", r"\boxed{\infty}"),
    ("5", r"\boxed{\text{nan}}"),
    ("5", r"\boxed{0/0}"),
    ("5", "I do not know"),
    ("5", r"\boxed{2 \sin x}"),
    ("2", r"\boxed{2 sin x}"),
    # guesses and denials
    ("5", r"\boxed{4 \lor 5}"),
    ("5", "Answer: 4, maybe 5"),
    ("4", "Answer: 4, maybe 5"),
    ("5", "Answer: 4 because 5"),
    ("5", "The answer is between 4 and 5"),
    ("5", "Answer: 4 and 5 apples"),
    ("5", "Answer: 1 2 3 4 5"),
    ("5", "Answer: not 5"),
    ("5", r"\boxed{\neq 5}"),
    ("5", r"\boxed{\geq 5}"),
    ("5", r"\boxed{> 5}"),
    ("5", r"\boxed{\{1,2,3,4,5\}}"),
    ("5", r"\boxed{4 < x < 6}"),
    ("5", r"\boxed{5 \pm 1}"),
    (r"\sqrt{2}^{2016}", r"\boxed{\sqrt{2}^{2015}}"),
    ("10^{30}+1", r"\boxed{10^{30}}"),
]


@pytest.mark.parametrize(("gold", "text"), RIGHT)
def test_equal_in_value(gold: object, text: str) -> None:
    result = score(text, gold)
    assert (result.reward, result.rewards["accuracy"]) == (1.0, 1.0), result.details


@pytest.mark.parametrize(("gold", "text"), WRONG)
def test_not_equal_in_value(gold: object, text: str) -> None:
    assert score(text, gold).reward == 0.0


def test_there_are_enough_golden_cases() -> None:
    assert len(RIGHT) + len(WRONG) >= 60


@pytest.mark.parametrize(
    "statement",
    [
        "10^{10^{10}}",
        "9^{9^{9^{9}}}",
        "10**10**10",
        "(" * 900 + "5" + ")" * 900,
        "{" * 900 + "5" + "}" * 900,
        r"\frac{1}{" * 300 + "5" + "}" * 300,
        r"\text{__import__('os').system('touch /tmp/prorl-pwned')}",
        "__import__('os').system('touch /tmp/prorl-pwned')",
        r"\sqrt" * 500,
        "\\\\" * 500,
        "5" * 5000,
        "\udcff\0",
    ],
)
def test_a_hostile_statement_is_wrong_within_its_time(statement: str) -> None:
    result = score(rf"\boxed{{{statement}}}", "6", seconds=0.5)
    assert result.reward == 0.0
    assert not Path("/tmp/prorl-pwned").exists()


def test_a_statement_that_takes_too_long_says_so() -> None:
    result = score(r"\boxed{9^{9^{9^{9}}}}", "6", seconds=0.3)
    assert (result.details["trouble"], result.details["format_ok"]) == ("time", True)


def test_an_expected_answer_that_takes_too_long_is_the_graders_fault() -> None:
    with pytest.raises(InvalidSettings, match=r"expected answer .* cannot be read \(time\)"):
        score(r"\boxed{6}", r"9^{9^{9^{9}}} + 1/3", seconds=0.3)


@pytest.mark.parametrize("text", [None, "", "  \n", r"\boxed{}", "$$"])
def test_no_answer_is_told_from_a_wrong_one(text: str | None) -> None:
    result = score(text, "5", unanswered_reward=-1, incorrect_reward=-0.5)
    assert result == Score(
        reward=-1.0,
        rewards={"reward": -1.0, "accuracy": 0.0, "format": 0.0, "answered": 0.0},
        details={
            "extracted": None,
            "how": None,
            "format_ok": False,
            "correct": False,
            "by": "numbers or text",
        },
        log="no answer was stated",
    )
    wrong = score(r"\boxed{6}", "5", unanswered_reward=-1, incorrect_reward=-0.5)
    assert (wrong.reward, wrong.rewards["answered"]) == (-0.5, 1.0)


def test_a_bare_last_line_is_right_in_another_form() -> None:
    result = score("I think\n5", "5")
    assert (result.reward, result.rewards["format"]) == (1.0, 0.0)
    assert (result.details["how"], result.details["extracted"]) == ("last_line", "5")


@pytest.mark.parametrize(
    ("wanted", "text", "reward"),
    [
        ("boxed", "Answer: 5", 0.0),
        ("boxed", r"Answer: 6 \boxed{5}", 1.0),
        ("answer_line", r"\boxed{5}", 0.0),
        ("answer_line", "\\boxed{6}\nAnswer: 5", 1.0),
        ("answer_line", "Answer: $\\boxed{5}$.", 1.0),
        ("whole", r"\boxed{5}", 1.0),
        ("whole", "5", 1.0),
        ("whole", r"\frac{10}{2}", 1.0),
    ],
)
def test_the_format_says_where_the_answer_stands(wanted: str, text: str, reward: float) -> None:
    assert score(text, "5", format=wanted).reward == reward


def test_several_boxes_are_a_list_where_the_setting_says_so() -> None:
    text = r"\boxed{1} and \boxed{2}"
    assert score(text, "1, 2").reward == 0.0
    assert score(text, "1, 2", multiple="all").reward == 1.0


def test_only_the_tail_is_read() -> None:
    text = r"\boxed{5}" + "x" * 300
    assert score(text, "5", format="boxed").reward == 1.0
    assert score(text, "5", format="boxed", tail_characters=300).reward == 0.0


def test_names_of_variables_matter_unless_told_otherwise() -> None:
    assert score(r"\boxed{y+1}", "x+1").reward == 0.0
    assert score(r"\boxed{y+1}", "x+1", strict=False).reward == 1.0


def test_an_expected_sentence_is_compared_as_text() -> None:
    assert score("Answer: the red one", "the red one").reward == 1.0
    assert score("Answer: the blue one", "the red one").reward == 0.0


@pytest.mark.parametrize(
    ("settings", "gold", "word"),
    [
        ({"formatt": "any"}, "5", "formatt"),
        ({"format": "boxes"}, "5", "format"),
        ({"tail_characters": -1}, "5", "tail_characters"),
        ({"tail_characters": True}, "5", "tail_characters"),
        ({"float_rounding": 51}, "5", "float_rounding"),
        ({"seconds": 0}, "5", "seconds"),
        ({"strict": 1}, "5", "strict"),
        ({"multiple": "first"}, "5", "multiple"),
        ({}, [], "answer"),
        ({}, None, "answer"),
    ],
)
def test_a_wrong_setting_is_named(settings: dict[str, Any], gold: object, word: str) -> None:
    with pytest.raises(InvalidSettings, match=word):
        score("5", gold, **settings)


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("$5$.", "5"),
        (r"\(5\)", "5"),
        ("**5**", "5"),
        ("5**", "5"),
        ("$5$ or $6$", "$5$ or $6$"),
        ("$", "$"),
        ("", ""),
    ],
)
def test_tidy_takes_off_what_encloses_all(text: str, plain: str) -> None:
    assert tidy(text) == plain


def test_plain_numbers_need_no_library() -> None:
    assert quick_verdict("1,000.50", "1000.5", Rounding()) is True
    assert quick_verdict("7", "8", Rounding()) is False
    assert quick_verdict("0.000000001", "0", Rounding()) is False
    assert quick_verdict("1/2", "0.5", Rounding()) is None


def test_the_child_process_keeps_its_own_alarm() -> None:
    result = runner.score(
        "math", {}, {"answer": r"\frac{1}{2}"}, Artefacts(answer=r"\boxed{0.5}"), timeout_seconds=60
    )
    assert (result.reward, result.details["by"]) == (1.0, "math-verify")


def test_a_comparison_that_is_killed_leaves_no_process_behind() -> None:
    artefacts = Artefacts(answer=r"\boxed{9^{9^{9^{9}}}}")
    with pytest.raises(EvaluatorTimeout):
        runner.score("math", {"seconds": 600}, {"answer": "1/2"}, artefacts, timeout_seconds=6)
    left = [
        child
        for child in psutil.Process().children(recursive=True)
        if "evaluators.child" in child.cmdline()
    ]
    assert left == []
