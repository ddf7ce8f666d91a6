"""Programming tasks: the forms of tests, the program in an answer, what is right."""

from __future__ import annotations

import base64
import json
import pickle
import zlib
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evaluators.base import Artefacts, Base, InvalidSettings, PhaseResult, Ran, Score
from evaluators.code import CodeEvaluator, extract_program
from evaluators.code_asserts import called_name, read_assertions
from evaluators.code_compare import same_output, same_value
from evaluators.code_runner import READY
from evaluators.code_task import LANGUAGES, read_task
from evaluators.code_values import Unreadable, pack, unpack
from evaluators.unfit import TaskUnfit

CODE = CodeEvaluator()
PAIRS = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}
CALLS = {"inputs": ["[1, 2]\n3"], "outputs": ["[4, 5]"], "fn_name": "shift"}
PROGRAM = "```python\nprint(1)\n```"
PLAIN_CHECK = "def check(candidate):\n    assert candidate(1) == 2\n    assert candidate(2)\n"
CHECK = "def check(candidate):\n    for i in range(3):\n        assert candidate(i) == 2 * i\n"


def told(
    *lines: dict[str, Any], ready: bool = True, first: dict[str, Any] | None = None
) -> PhaseResult:
    """Return what the runner left that printed these lines."""
    said = [{"ready": READY}] if ready else []
    said += [first] if first else []
    said += [{"test": number, **line} for number, line in enumerate(lines)]
    stdout = b"".join(json.dumps(line).encode() + b"\n" for line in said)
    ran = Ran(exit_code=0, stdout=stdout, stderr=b"no python3", seconds=1.0)
    return PhaseResult(name="tests", commands=(ran,))


def graded(
    payload: Mapping[str, Any], left: PhaseResult, settings: Mapping[str, Any] | None = None
) -> Score:
    """Score what the runner left of a program."""
    CODE.validate(settings or {}, payload)
    artefacts = Artefacts(answer=PROGRAM, phases=(left,))
    assert CODE.next_phase(settings or {}, payload, artefacts) is None
    return CODE.score(settings or {}, payload, artefacts)


def printed(text: str) -> dict[str, Any]:
    return {"status": "ok", "output": text, "seconds": 0.1}


def gave(value: Any) -> dict[str, Any]:
    return {"status": "ok", "value": pack(value), "seconds": 0.1}


def test_the_share_of_tests_and_all_of_them() -> None:
    half = graded(PAIRS, told(printed("3"), printed("8")))
    assert half.rewards == {"reward": 0.0, "accuracy": 0.0, "all_pass": 0.0, "pass_rate": 0.5}
    assert half.details["statuses"] == {"passed": 1, "wrong": 1}
    assert half.details["first_failed"]["test"] == 1
    whole = graded(PAIRS, told(printed("3 \n\n"), printed("7")))
    assert (whole.reward, whole.details["passed"]) == (1.0, 2)
    assert graded(PAIRS, told(printed("3"), printed("8")), {"reward": "pass_rate"}).reward == 0.5


def test_the_sandbox_is_told_the_inputs_and_never_what_is_right() -> None:
    secret = {"inputs": ["in"], "outputs": ["the answer"]}
    by_call = {"inputs": [["in"]], "outputs": ["the answer"], "fn_name": "f"}
    by_assertion = {"test_list": ["assert f('in') == 'the answer'"]}
    for payload in (secret, by_call, by_assertion):
        phase = CODE.next_phase({}, payload, Artefacts(answer=PROGRAM))
        assert phase is not None
        assert (phase.base, phase.network) == (Base.PREPARED, False)
        given = [data for data, _ in phase.files.values()] + [c.stdin for c in phase.commands]
        assert any(b'"in"' in data for data in given)
        assert not any(b"the answer" in data for data in given)


def test_what_is_no_pass() -> None:
    left = told({"status": "timeout"}, {"status": "not_run"})
    assert graded(PAIRS, left).details["statuses"] == {"timeout": 1, "not_run": 1}
    assert graded(PAIRS, told(printed("3"))).details["statuses"] == {"passed": 1, "no_result": 1}
    broken = told(first={"compile": "compile_error", "exit": 1, "error": "expected ';'"})
    score = graded(PAIRS, broken)
    assert score.details["statuses"] == {"compile_error": 2}
    assert score.details["first_failed"]["error"] == "expected ';'"
    for line in ({"status": "ok"}, {"status": "ok", "output": 3}, {"status": None}, {}):
        assert graded(PAIRS, told(line, line)).rewards["pass_rate"] == 0.0
    for value in ({"what": 1}, {"int": "x"}, {"dict": 5}, {"float": []}, None):
        assert graded(CALLS, told({"status": "ok", "value": value})).reward == 0.0


def test_a_sandbox_without_python_is_no_fault_of_the_program_s() -> None:
    with pytest.raises(TaskUnfit, match=r"needs python3.*no python3"):
        graded(PAIRS, told(ready=False))


def test_an_answer_without_a_program_runs_nothing() -> None:
    for answer in (None, "", "```python\nnot closed", "```text\nhello\n```"):
        artefacts = Artefacts(answer=answer)
        assert CODE.next_phase({}, PAIRS, artefacts) is None
        score = CODE.score({}, PAIRS, artefacts)
        assert (score.reward, score.details["statuses"]) == (0.0, {"no_program": 2})


def test_a_file_that_the_agent_left_is_the_program() -> None:
    settings = {"path": "/app/main.py"}
    first = CODE.next_phase(settings, PAIRS, Artefacts())
    assert first is not None
    assert (first.base, first.workspace) == (Base.AGENT, ("/app",))
    assert first.commands == ()
    left = PhaseResult(name="file", files={"/app/main.py": b"print(2)"})
    second = CODE.next_phase(settings, PAIRS, Artefacts(phases=(left,)))
    assert second is not None
    assert b"print(2)" in [data for data, _ in second.files.values()]
    gone = Artefacts(phases=(PhaseResult(name="file", files={"/app/main.py": None}),))
    assert CODE.next_phase(settings, PAIRS, gone) is None


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("a\n```python\nx = 1\n```\nb\n```py\ny = 2\n```\nbye", "y = 2\n"),
        ("```\nplain\n```", "plain\n"),
        ("```python\nx = 1\n```\nIt prints:\n```\n1\n```", "x = 1\n"),
        ("```python\nx = 1\n```\n```cpp\nint x;\n```", "x = 1\n"),
        ("```python\nx = 1\n```\n```python\nnot closed", "x = 1\n"),
        ("<think>```python\nbad\n```</think>```python\ngood\n```", "good\n"),
        ("````python\nprint('```')\n````", "print('```')\n"),
        ("```python\r\nx = 1\r\n```\r\n", "x = 1\n"),
        ("  ```python\n  x = 1\n  ```", "  x = 1\n"),
        ("~~~python\nx = 1\n~~~", "x = 1\n"),
        ("print(1)", "print(1)"),
        ("```bash\nls\n```", ""),
    ],
)
def test_the_program_in_an_answer(text: str, program: str) -> None:
    assert extract_program(text, LANGUAGES["python"]) == program


def test_a_completion_gets_its_beginning() -> None:
    payload = {"test": "assert f(1) == 1", "entry_point": "f", "prompt": "def f(x):\n"}
    for answer, expected in (
        ("```python\n    return x\n```", b"def f(x):\n    return x\n"),
        ("```python\ndef f(y): return y\n```", b"def f(y): return y\n"),
    ):
        phase = CODE.next_phase({}, payload, Artefacts(answer=answer))
        assert phase is not None
        assert expected in [data for data, _ in phase.files.values()]


@pytest.mark.parametrize(
    ("payload", "kind", "name", "count"),
    [
        (PAIRS, "stdin", "", 2),
        ({"verifier_metadata": {"unit_tests": PAIRS}}, "stdin", "", 2),
        ({"unit_tests": {**PAIRS, "fn_name": None}}, "stdin", "", 2),
        ({"ground_truth": json.dumps(PAIRS)}, "stdin", "", 2),
        ({"inputs": [["1", "2"]], "outputs": [["3"]]}, "stdin", "", 1),
        (CALLS, "call", "shift", 1),
        ({"inputs": [[1, [2]]], "outputs": [[3]], "fn_name": "f"}, "call", "f", 1),
        ({"tests": [{"input": "1", "output": "2", "testtype": "stdin"}]}, "stdin", "", 1),
        (
            {
                "public_test_cases": '[{"input": "1", "output": "2", "testtype": "functional"}]',
                "private_test_cases": [{"input": "3", "output": "4", "testtype": "functional"}],
                "metadata": '{"func_name": "f"}',
            },
            "call",
            "f",
            2,
        ),
        ({"test_list": ["assert f(1) == 2", "assert f(2) == 3"]}, "call", "f", 2),
        ({"test": PLAIN_CHECK, "entry_point": "f"}, "call", "f", 2),
        ({"test": CHECK, "entry_point": "f"}, "check", "f", 1),
        ({"test_list": ["assert f(1) == g(2)"]}, "check", "f", 1),
        ({"test_list": ["assert f(1) == 2"], "test_setup_code": "x = 1"}, "check", "f", 1),
    ],
)
def test_the_forms_of_tests(payload: dict[str, Any], kind: str, name: str, count: int) -> None:
    task = read_task({}, payload)
    assert (task.kind, task.name, len(task.tests)) == (kind, name, count)


PICKLED = base64.b64encode(zlib.compress(pickle.dumps("[]"))).decode()


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        ({}, "no tests"),
        ({"inputs": [], "outputs": []}, "0 tests"),
        ({"inputs": ["1"], "outputs": []}, "1 inputs and 0 outputs"),
        ({"inputs": "1", "outputs": "2"}, "must be lists"),
        ({"inputs": [1], "outputs": ["2"]}, "must be text"),
        ({"inputs": ["{"], "outputs": ["2"], "fn_name": "f"}, "no JSON"),
        ({"inputs": [5], "outputs": [2], "fn_name": "f"}, "list of arguments"),
        ({**CALLS, "fn_name": "import"}, "no name of a function"),
        ({**CALLS, "fn_name": "f()"}, "no name of a function"),
        ({"tests": [{"input": "1"}]}, "'input' and 'output'"),
        ({"tests": [{"input": "1", "output": "2", "testtype": "x"}]}, "testtype"),
        ({"tests": [{"input": "1", "output": "2", "testtype": "functional"}]}, "fn_name"),
        ({"private_test_cases": PICKLED}, "pickle"),
        ({"test_list": ["assert ("]}, "no Python"),
        ({"test_list": ["x = 1"]}, "call no function"),
        ({"unit_tests": 5}, "no map"),
    ],
)
def test_wrong_payloads_are_named(payload: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidSettings, match=message):
        CODE.validate({}, payload)


@pytest.mark.parametrize(
    "settings",
    [
        {"language": "cobol"},
        {"compare": "fuzzy"},
        {"tolerance": -1},
        {"test_seconds": 0},
        {"most_timeouts": 0},
        {"memory_bytes": "1G"},
        {"path": "main.py"},
        {"file": "a/b.py"},
        {"reward": "mean"},
        {"source": "stdout"},
        {"timeout": 1},
    ],
)
def test_wrong_settings_are_named(settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidSettings, match=next(iter(settings))):
        CODE.validate(settings, PAIRS)
    with pytest.raises(InvalidSettings, match="'python' only"):
        CODE.validate({"language": "cpp"}, CALLS)


@pytest.mark.parametrize(
    ("expected", "output", "lines", "tokens"),
    [
        ("3\n", "3", True, True),
        ("1 2\n3\n", "1 2  \n3\n\n", True, True),
        ("1 2\n3\n", "1 2 3", False, True),
        ("a\n\nb", "a\nb", False, True),
        ("1.0", "1", True, True),
        ("0.3333333", "0.33333334", True, True),
        ("50000000000000000", "50000000000000001", False, False),
        ("1e3", "1000.0", True, True),
        ("nan", "nan", True, True),
        ("1_0", "10", False, False),
        ("Yes", "YES", False, False),
        ("x 1.0", "x 1", False, True),
        ("", "", True, True),
        ("3\r\n4", "3\n4", True, True),
    ],
)
def test_printed_text(expected: str, output: str, lines: bool, tokens: bool) -> None:
    assert same_output(expected, output, comparison="lines", tolerance=1e-6) is lines
    assert same_output(expected, output, comparison="tokens", tolerance=1e-6) is tokens
    assert same_output(expected, output, comparison="exact", tolerance=1) is (expected == output)


def test_without_tolerance_numbers_are_equal_or_not() -> None:
    assert same_output("1.0", "1", comparison="lines", tolerance=0)
    assert not same_output("0.1", "0.10000001", comparison="lines", tolerance=0)


@pytest.mark.parametrize(
    ("expected", "value", "same"),
    [
        ([1, [2]], (1, (2,)), True),
        ([1, 2], {1, 2}, False),
        (1, True, False),
        (True, True, True),
        (1, 1.0, True),
        (0.1 + 0.2, 0.3, True),
        (10**17, 10**17 + 1, False),
        (10**400, 0.5, False),
        ("1", 1, False),
        (None, None, True),
        ({"1": [True]}, {1: (True,)}, True),
        ({"true": 1}, {True: 1}, True),
        ({"a": 1}, {"a": 1, "b": 2}, False),
        (float("nan"), float("nan"), False),
    ],
)
def test_values(expected: Any, value: Any, same: bool) -> None:
    assert same_value(expected, value, tolerance=1e-6) is same


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
    | st.binary() | st.complex_numbers(allow_nan=False),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)  # fmt: skip


@given(value=plain | st.sets(st.integers()) | st.frozensets(st.text()))
def test_plain_values_come_back_as_they_were(value: Any) -> None:
    back = unpack(json.loads(json.dumps(pack(value))))
    assert back == value
    assert type(back) is type(value)


def test_other_objects_equal_nothing() -> None:
    class Same:
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = None  # type: ignore[assignment]

    back = unpack(pack([Same()]))
    assert isinstance(back[0], Unreadable)
    assert back != [1]
    assert unpack(pack(range(3))) == [0, 1, 2]


KINDS = ["int", "dict", "set", "tuple", "bytes", "float", "complex", "repr", "x"]
made_up = st.recursive(
    st.none() | st.integers() | st.text(),
    lambda inner: st.dictionaries(st.sampled_from(KINDS), inner, max_size=2) | st.lists(inner),
    max_leaves=8,
)


@given(value=made_up)
def test_a_value_that_a_program_made_up_is_a_value_or_refused(value: Any) -> None:
    score = graded(CALLS, told({"status": "ok", "value": value}))
    assert score.reward == float(unpacked(value) == [4, 5])


def unpacked(value: Any) -> Any:
    try:
        return unpack(value)
    except (ValueError, OverflowError, TypeError):
        return None


@pytest.mark.parametrize(
    ("source", "right", "wrong"),
    [
        ("assert f(1) == 2", 2, 3),
        ("assert 2 == f(1)", 2, "2"),
        ("assert f((1, 2), [3]) == {'a': (1,)}", {"a": (1,)}, {"a": [1]}),
        ("assert set(f((3, 4))) == set((4,))", (4, 4), (3,)),
        ("assert sorted(f([1])) == [1, 2]", [2, 1], 5),
        ("assert abs(f(1) - 0.5) < 1e-6", 0.5000001, 0.51),
        ("import math\nassert math.isclose(f(2), 1.4, rel_tol=0.1)", 1.41, None),
        ("assert f('a')", "yes", ""),
        ("assert not f('a')", [], [1]),
        ("assert f(-1) is None", None, 0),
        ("assert f(2 ** 3, 'ab' * 2)[0] == 'x' and True", ["x"], []),
        ("assert len(f(1)) in (1, 2)", "ab", "abc"),
        ("assert f(1)[1:][::-1] == [3, 2], 'told'", [1, 2, 3], [3, 2, 1]),
        ("assert 0 <= f(1) < 5", 4, 5),
    ],
)
def test_plain_assertions_are_decided_outside(source: str, right: Any, wrong: Any) -> None:
    found = read_assertions(source, "f")
    assert found is not None
    assert (found[0].holds(right), found[0].holds(wrong)) == (True, False)
    assert called_name(source) in ("f", "")


@pytest.mark.parametrize(
    "source",
    [
        "assert f(1) == g(2)",
        "assert f(f(1)) == 2",
        "assert f(x) == 2",
        "assert f(1) + np.ones(2) == 2",
        "assert f(*[1]) == 2",
        "assert f(a=1) == 2",
        "assert [x for x in f(1)] == [1]",
        "assert f(1).count('a') == 1",
        "assert (lambda: f(1))() == 1",
        "x = 1\nassert f(1) == 1",
        "for i in (1,):\n    assert f(i) == 1",
        "assert f(1 / 0) == 1",
        "assert f(__import__('os').getpid()) == 1",
        "check(f, 2)\nassert f(1) == open('/etc/passwd')",
        "pass",
    ],
)
def test_what_is_no_plain_assertion_is_run_as_it_is(source: str) -> None:
    assert read_assertions(source, "f") is None
