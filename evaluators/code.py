"""Run the agent's program on hidden tests, in a sandbox that does not know the answers.

Payload (hidden), in one of the forms of data sets; `verifier_metadata`, `metadata`, `unit_tests`
and `ground_truth` (a map, or its JSON text) are looked into:

- `inputs` and `outputs`, lists: of text for a program that reads and prints; with `fn_name`, of
  arguments and values of that function, as lists or as text with one JSON value a line.
- `tests` (or `public_test_cases` and `private_test_cases`): list, or JSON text of one, of
  `{"input", "output", "testtype": "stdin" | "functional"}`; `fn_name` or `func_name`. What is
  packed with pickle is refused.
- `test_list`: assertions (MBPP), or `test` with `entry_point`: a `check(candidate)` (HumanEval).
  `test_setup_code`, `test_imports` stand before them. `prompt` is put before an answer that only
  completes it.

Settings: `source` (`answer_or_last_message`, `answer`, `last_message`), or `path`: absolute path
of a file that the agent left. `language` (`python`, `cpp`, `c`, `rust`, `go`, `java`,
`javascript`), whose `file`, `compile` and `run` commands can be replaced; `{folder}` stands for
where they are. `test_seconds` of processor time a test (10), `compile_seconds` (60),
`memory_bytes` of address space (1 GiB for Python), `most_timeouts` after which the rest is not run
(3). `compare`: `lines`, `tokens` or `exact`; `tolerance` for numbers (1e-6, 0 for none).
`reward`: `all_pass` or `pass_rate`. `network`.

Rewards: `all_pass`, `accuracy` (the same), `pass_rate`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from evaluators import code_candidate, code_runner, code_values
from evaluators.answers import choose
from evaluators.base import (
    Artefacts,
    Base,
    Command,
    Evaluator,
    JsonMap,
    Phase,
    PhaseResult,
    Score,
)
from evaluators.code_compare import same_output, same_value
from evaluators.code_task import CodeTask, Language, Test, read_task
from evaluators.unfit import TaskUnfit

FILE_PHASE, TESTS_PHASE = "file", "tests"
ANSWER_BYTES = 1_000_000
BATCH_BYTES = 4_000_000
SPARE_BYTES = 4096
FOLDER = "/tmp/.prorl-code"  # noqa: S108 -- in a sandbox that is made for this alone
_FENCE = re.compile(
    r"^[ \t]*(`{3,}|~{3,})[ \t]*([^\s`]*)[^\n`]*\n(.*?)^[ \t]*\1[ \t]*$", re.M | re.S
)


class CodeEvaluator(Evaluator):
    """Run a program on tests; what it gives is compared outside of the sandbox.

    The module says what settings and payload hold.
    """

    name = "code"
    description = "Hidden tests run the program that the agent wrote."
    needs_sandbox = True

    def validate(self, settings: JsonMap, payload: JsonMap) -> None:
        """Raise `InvalidSettings` for the first wrong field."""
        read_task(settings, payload)

    def next_phase(self, settings: JsonMap, payload: JsonMap, artefacts: Artefacts) -> Phase | None:
        """Return the sandbox that gives the agent's file out, then the one that runs the tests."""
        task = read_task(settings, payload)
        if task.path and artefacts.phase(FILE_PHASE) is None:
            return Phase(
                name=FILE_PHASE,
                workspace=(str(Path(task.path).parent),),
                collect={task.path: ANSWER_BYTES},
            )
        program = _program(task, settings, artefacts)
        if program is None or artefacts.phase(TESTS_PHASE) is not None:
            return None
        return _tests_phase(task, program)

    def score(self, settings: JsonMap, payload: JsonMap, artefacts: Artefacts) -> Score:
        """Score the tests' results; raise `TaskUnfit` when the sandbox could not run any."""
        task = read_task(settings, payload)
        if _program(task, settings, artefacts) is None:
            return _score(task, ["no_program"] * len(task.tests), {}, log="")
        left = artefacts.phase(TESTS_PHASE) or PhaseResult(name=TESTS_PHASE)
        log = "".join(ran.stderr.decode(errors="replace") for ran in left.commands)
        told = list(_lines(left))
        if not any(line.get("ready") == code_runner.READY for line in told):
            raise TaskUnfit(
                "the prepared sandbox could not run the tests; the image needs python3 (3.6 or "
                f"newer) with the standard library: {log[-500:]}",
                log=log,
            )
        found = {line["test"]: line for line in told if isinstance(line.get("test"), int)}
        broken = next((line for line in told if line.get("compile") == "compile_error"), None)
        missing = "compile_error" if broken else "no_result"
        statuses = [
            _status(task, test, found.get(number, {"status": missing}))
            for number, test in enumerate(task.tests)
        ]
        return _score(task, statuses, {**found, **({-1: broken} if broken else {})}, log=log)


def _program(task: CodeTask, settings: JsonMap, artefacts: Artefacts) -> str | None:
    """Return the program's source, None when the agent left none."""
    if task.path:
        left = artefacts.phase(FILE_PHASE)
        data = left.files.get(task.path) if left else None
        text = data.decode(errors="replace") if data else ""
    else:
        text = extract_program(choose(settings, artefacts) or "", task.language)
    if not text.strip() or len(text.encode(errors="replace")) > ANSWER_BYTES:
        return None
    if task.prompt and not re.search(rf"^\s*(?:async )?def {task.name}\b", text, re.MULTILINE):
        return f"{task.prompt.rstrip()}\n{text}"
    return text


def extract_program(text: str, language: Language) -> str:
    """Return the last closed block of the language in an answer; without blocks, all of it.

    Reasoning that a model ends with `</think>` is not looked into, nor a block that is not closed.
    """
    text = text.replace("\r\n", "\n").rpartition("</think>")[2]
    blocks = [match for match in _FENCE.finditer(text) if match[2].lower() in language.tags]
    tagged = [match for match in blocks if match[2]]
    if tagged or blocks:
        return (tagged or blocks)[-1][3]
    return "" if "```" in text else text


def _tests_phase(task: CodeTask, program: str) -> Phase:
    folder = f"{FOLDER}-{hashlib.sha256(program.encode(errors='replace')).hexdigest()[:16]}"
    files = {
        f"{folder}/evaluators/{Path(str(module.__file__)).name}": (
            Path(str(module.__file__)).read_bytes(),
            0o644,
        )
        for module in (code_runner, code_candidate, code_values)
    }
    files[f"{folder}/{task.language.file}"] = (program.encode(errors="replace"), 0o644)
    start = (
        f"import sys; sys.path.insert(0, '{folder}'); "
        "from evaluators.code_runner import main; main()"
    )
    commands = [
        Command(
            argv=("/bin/sh", "-c", f'exec python3 -I -B -c "{start}"'),
            stdin=json.dumps(request).encode(),
            cwd="/",
            output_bytes=2 * most + 1024 * 1024,
        )
        for request, most in _requests(task, folder)
    ]
    return Phase(
        name=TESTS_PHASE,
        base=Base.PREPARED,
        files=files,
        commands=tuple(commands),
        network=task.network,
    )


def _requests(task: CodeTask, folder: str) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield what the runner is asked, in batches, and the most bytes that it answers.

    Checks are one batch: they hold what is right, and a second runner would be started in a
    sandbox where the program has been.
    """
    batch: list[dict[str, Any]] = []
    first = size = most = 0
    for number, test in enumerate(task.tests):
        asked = _asked(test)
        batch.append(asked)
        size += len(str(asked))
        most += asked["most"]
        is_last = number == len(task.tests) - 1
        if is_last or (task.kind != "check" and max(size, most) > BATCH_BYTES):
            yield _request(task, folder, batch, first), most
            batch, first, size, most = [], number + 1, 0, 0


def _request(
    task: CodeTask, folder: str, batch: Sequence[dict[str, Any]], first: int
) -> dict[str, Any]:
    run = task.run.replace("{folder}", folder)
    return {
        "kind": task.kind,
        "name": task.name,
        "folder": folder,
        "file": task.language.file,
        "argv": ["/bin/sh", "-c", run] if run else [],
        "compile": task.compile.replace("{folder}", folder) if first == 0 else "",
        "compile_seconds": task.compile_seconds,
        "seconds": task.seconds,
        "memory": task.memory,
        "most_timeouts": task.most_timeouts,
        "imports": list(task.imports),
        "first": first,
        "tests": list(batch),
    }


def _asked(test: Test) -> dict[str, Any]:
    """Return what the runner is told of a test: never what is right, but for checks."""
    if test.check:
        return {"source": test.check, "most": 1024 * 1024}
    if isinstance(test.expected, str) and not test.args and test.assertion is None:
        return {"stdin": test.stdin, "most": SPARE_BYTES + 2 * len(test.expected.encode())}
    known = test.assertion.source if test.assertion else json.dumps(test.expected)
    args = code_values.pack(list(test.args))
    return {"args": args, "most": SPARE_BYTES + 16 * len(known)}


def _lines(left: PhaseResult) -> Iterator[dict[str, Any]]:
    for ran in left.commands:
        for line in ran.stdout.split(b"\n"):
            try:
                told = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(told, dict):
                yield told


def _status(task: CodeTask, test: Test, told: dict[str, Any]) -> str:
    """Return what became of a test: `passed`, `wrong` or why it gave nothing."""
    status = str(told.get("status"))
    if status != "ok":
        return status[:40]
    return "passed" if _is_right(task, test, told) else "wrong"


def _is_right(task: CodeTask, test: Test, told: dict[str, Any]) -> bool:
    if task.kind == "check":
        return True
    if task.kind == "stdin":
        output = told.get("output")
        return isinstance(output, str) and same_output(
            test.expected, output, comparison=task.comparison, tolerance=task.tolerance
        )
    try:
        value = code_values.unpack(told.get("value"))
    except (ValueError, RecursionError, OverflowError, TypeError):
        return False
    if test.assertion is not None:
        return test.assertion.holds(value)
    if same_value(test.expected, value, tolerance=task.tolerance):
        return True
    one = test.expected if test.is_wrapped else []
    return len(one) == 1 and same_value(one[0], value, tolerance=task.tolerance)


def _score(
    task: CodeTask, statuses: Sequence[str], told: dict[int, dict[str, Any]], *, log: str
) -> Score:
    passed = statuses.count("passed")
    rewards = {
        "all_pass": float(passed == len(statuses)),
        "pass_rate": passed / len(statuses),
    }
    reward = rewards[task.reward]
    failed = next((number for number, status in enumerate(statuses) if status != "passed"), None)
    details: dict[str, Any] = {
        "tests": len(statuses),
        "passed": passed,
        "statuses": dict(Counter(statuses)),
        "seconds": round(sum(_seconds(line) for line in told.values()), 3),
    }
    if failed is not None:
        line = told.get(failed) or told.get(-1) or {}
        details["first_failed"] = {
            "test": failed,
            "status": statuses[failed],
            "exit_code": line.get("exit"),
            "error": str(line.get("error", ""))[-600:],
        }
    return Score(
        reward=reward,
        rewards={"reward": reward, "accuracy": rewards["all_pass"], **rewards},
        details=details,
        log=log,
    )


def _seconds(line: dict[str, Any]) -> float:
    seconds = line.get("seconds", 0.0)
    return seconds if isinstance(seconds, int | float) and 0 <= seconds < 1e9 else 0.0
