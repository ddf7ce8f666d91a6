"""Programs of models on hidden tests in real sandboxes."""

import json
from collections.abc import Iterator
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import pytest

from evaluators.base import Score
from evaluators.code import CodeEvaluator
from sandboxes.runtime.apptainer import ApptainerRuntime
from tests.nemo_gym import wheel_file
from tests.sandbox.conftest import starter
from tests.sandbox.grading import Grader

pytestmark = pytest.mark.sandbox

CODE = CodeEvaluator()
SUM = "a, b = map(int, input().split())\nprint(a + b)"
PAIRS = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}
CHECK = """
import math, random
def check(candidate):
    for i in range(9):
        x = random.random()
        assert math.fabs(candidate([x, 2])[0] - x * 2) < 1e-9
    try:
        candidate(None)
        assert False
    except TypeError:
        pass
"""
DOUBLE = "def f(numbers):\n    return [2 * x for x in numbers]"


@pytest.fixture(scope="module")
def grader(apptainer_runtime: ApptainerRuntime, base_image: Path) -> Iterator[Grader]:
    made: list[str] = []
    yield Grader(apptainer_runtime, starter(apptainer_runtime, str(base_image), made), "/app")
    for name in made:
        apptainer_runtime.stop(name)


def graded(grader: Grader, payload: dict[str, Any], program: str, **settings: Any) -> Score:
    fenced = f"```python\n{program}\n```"
    return grader.grade(CODE, payload, settings=settings, answer=fenced)


def test_programs_and_functions_and_checks(grader: Grader) -> None:
    assert graded(grader, PAIRS, SUM).details["statuses"] == {"passed": 2}
    method = (
        "class Solution:\n    def shift(self, xs: List[int], by: int):\n"
        "        print('noise')\n        return tuple(x + by for x in deque(xs))"
    )
    calls = {"inputs": ["[1, 2]\n3", "[]\n0"], "outputs": ["[4, 5]", "[]"], "fn_name": "shift"}
    assert graded(grader, calls, method).reward == 1.0
    mbpp = {"test_list": ["assert set(f((3, 4), (4, 5))) == {4}", "assert f((1,), (2,)) == ()"]}
    assert graded(grader, mbpp, "f = lambda a, b: tuple(set(a) & set(b))").reward == 1.0
    check = {"test": CHECK, "entry_point": "f"}
    assert graded(grader, check, DOUBLE).reward == 1.0
    wrong = graded(grader, check, DOUBLE + " if numbers else []")
    assert wrong.details["statuses"] == {"wrong": 1}


def test_limits_end_a_test_and_not_the_others(grader: Grader) -> None:
    program = """
n = int(input())
if n == 1:
    while True: pass
if n == 2:
    [0] * 10**10
if n == 3:
    while True: print("x" * 10**6)
if n == 4:
    import os, time
    if os.fork() == 0:
        os.setsid()
        time.sleep(600)
    raise SystemExit(3)
if n == 5:
    import os
    os.kill(os.getpid(), 9)
print(n)
"""
    payload = {"inputs": [f"{n}\n" for n in range(1, 7)], "outputs": [str(n) for n in range(1, 7)]}
    score = graded(grader, payload, program, test_seconds=1)
    found = {"timeout": 1, "memory": 1, "output": 1, "error": 2, "passed": 1}
    assert score.details["statuses"] == found


def test_after_too_many_timeouts_the_rest_is_not_run(grader: Grader) -> None:
    payload = {"inputs": ["", "", ""], "outputs": ["1", "1", "1"]}
    score = graded(grader, payload, "while True: pass", test_seconds=1, most_timeouts=1)
    assert score.details["statuses"] == {"timeout": 1, "not_run": 2}


@pytest.mark.parametrize(
    "program",
    [
        "import os\nos._exit(0)",
        "def f(numbers):\n    raise SystemExit(0)",
        "def f(numbers):\n    raise AssertionError",
        "import os\nos.kill(os.getppid(), 9)",
        "import os\nos.write(187, b'{\"value\": [1]}\\n' * 99)\nos._exit(0)",
        "class Equal(list):\n    __eq__ = lambda s, o: True\nf = lambda numbers: Equal([0])",
    ],
)
def test_a_program_that_does_not_compute_passes_no_check(grader: Grader, program: str) -> None:
    assert graded(grader, {"test": CHECK, "entry_point": "f"}, program).reward == 0.0


def test_a_program_cannot_look_into_the_process_that_holds_the_checks(grader: Grader) -> None:
    spy = """
import os
for name in ("mem", "fd/0", "fd/1", "environ", "maps"):
    try:
        print(name, open(f"/proc/{os.getppid()}/{name}", "rb").read(1))
    except PermissionError:
        print(name, "denied")
"""
    wanted = "mem denied\nfd/0 denied\nfd/1 denied\nenviron denied\nmaps denied\n"
    assert graded(grader, {"inputs": [""], "outputs": [wanted]}, spy).reward == 1.0


def test_many_large_tests_are_run_in_batches(grader: Grader) -> None:
    size = 1_500_000
    payload = {
        "inputs": [f"{letter * size}\n" for letter in "abcd"],
        "outputs": [letter * size for letter in "abcd"],
    }
    score = graded(grader, payload, "print(input())")
    assert (score.reward, len(grader.ran[0].commands)) == (1.0, 2)


def test_a_file_that_the_agent_left(grader: Grader) -> None:
    agent = f"mkdir -p /app && cat > /app/main.py <<'EOF'\n{SUM}\nEOF"
    score = grader.grade(CODE, PAIRS, agent, settings={"path": "/app/main.py"})
    assert score.reward == 1.0
    linked = "mkdir -p /app /tests && echo 'print(7)' > /tests/x && ln -s /tests/x /app/main.py"
    score = grader.grade(CODE, PAIRS, linked, settings={"path": "/app/main.py"})
    assert score.details["statuses"] == {"no_program": 2}


def test_other_languages_by_their_commands(grader: Grader) -> None:
    settings = {
        "language": "c",
        "compile": "sed 's/^/# /' main.c > script; echo 'read a b; echo $((a + b))' >> script",
        "run": "sh {folder}/script",
    }
    answer = "```c\nint main() {}\n```"
    assert grader.grade(CODE, PAIRS, settings=settings, answer=answer).reward == 1.0
    # The base image has no compiler.
    score = grader.grade(CODE, PAIRS, settings={"language": "c"}, answer=answer)
    assert score.details["statuses"] == {"compile_error": 2}
    assert "gcc" in score.details["first_failed"]["error"]


def prompt_of(row: dict[str, Any]) -> str:
    return str(row["responses_create_params"]["input"][0]["content"])


def alike(asked: str, prompt: str) -> float:
    return SequenceMatcher(None, asked, prompt[: len(asked)]).ratio()


def test_real_answers_of_models_score_as_they_did_elsewhere(grader: Grader) -> None:
    """NeMo Gym ships five answers with the rewards of its own grader, and their tests apart."""
    folder = "resources_servers/code_gen/data"
    rows, rollouts = (
        [json.loads(line) for line in wheel_file(f"{folder}/{name}").splitlines()]
        for name in ("example.jsonl", "example_rollouts.jsonl")
    )
    for rollout in rollouts:
        asked = prompt_of(rollout)[:1500]
        row = max(
            rows, key=lambda each: SequenceMatcher(None, asked, prompt_of(each)[:1500]).ratio()
        )
        tests = row["verifier_metadata"]["unit_tests"]
        told = rollout["result"]  # it stops at the first failure
        payload = {name: tests[name][: len(told[:20])] for name in ("inputs", "outputs")}
        answer = rollout["response"]["output"][-1]["content"][0]["text"]
        score = grader.grade(CODE, payload, answer=answer)
        assert score.reward == rollout["reward"]
        assert score.details["passed"] == sum(each is True for each in told[:20])
