"""NUL bytes and lone surrogates, which PostgreSQL refuses, cost no rollout its result."""

import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from evaluators.script import ScriptEvaluator
from rollouts.models import Attempt, Evaluation, JournalEntry, Rollout
from rollouts.services.claim import Claim
from rollouts.services.finish import EvalResult, fail_attempt, finish_eval, finish_run
from rollouts.services.journal import Step, append_step, read_steps
from rollouts.text import clean_json, clean_text
from sandboxes.runtime.factory import make_runtime
from sandboxes.runtime.protocol import SandboxSpec
from sandboxes.runtime.sessions import ShellSession
from tests.script_left import script_artefacts
from tests.services.line import bring_to, eval_result, make_group, make_node, run_result

pytestmark = pytest.mark.django_db(transaction=True)

HOSTILE = "a\0b\ud800c"
CLEAN = "a\ufffdb?c"


def held(stage: str) -> Claim:
    """Return a claim of the only rollout in a stage."""
    workers = make_node()
    make_group()
    claim = bring_to(Rollout.objects.get(), stage, workers)
    assert claim is not None
    return claim


@pytest.fixture
def folder() -> Iterator[Path]:
    """Yield a folder that any account can pass."""
    made = Path(tempfile.mkdtemp(prefix="prorl-text-tests-"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


@pytest.fixture
def shell(folder: Path) -> Iterator[ShellSession]:
    """Yield a real shell in a sandbox without isolation."""
    (folder / "image").mkdir()
    runtime = make_runtime("local", folder / "root", "text-", None)
    spec = SandboxSpec(name="text-1", image=str(folder / "image"))
    opened = runtime.open_shell(runtime.start(spec, timeout_seconds=30))
    yield opened
    opened.close()
    runtime.stop("text-1")
    runtime.close()


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("plain", "plain"),
        ("\0", "\ufffd"),
        ("\udcff", "?"),
        (HOSTILE, CLEAN),
        ("Grüße 你好 😀", "Grüße 你好 😀"),
    ],
)
def test_only_what_is_no_text_is_replaced(text: str, clean: str) -> None:
    assert clean_text(text) == clean


def test_cleaning_reaches_every_depth_and_the_names_of_members() -> None:
    value = {HOSTILE: [HOSTILE, {"deep": (HOSTILE, 1, None, True, 0.5)}]}

    assert clean_json(value) == {CLEAN: [CLEAN, {"deep": [CLEAN, 1, None, True, 0.5]}]}


def test_an_observation_with_hostile_text_is_journaled() -> None:
    claim = held("run")
    body = {"messages": [{"role": "tool", "content": HOSTILE, HOSTILE: 1}], "shell": None}

    append_step(claim=claim, step=Step(0, "observed", body))

    kept = {"messages": [{"role": "tool", "content": CLEAN, CLEAN: 1}], "shell": None}
    assert read_steps(claim=claim) == [Step(0, "observed", kept)]


def test_the_output_of_a_real_shell_with_binary_bytes_is_journaled(shell: ShellSession) -> None:
    claim = held("run")
    output = shell.run(r"printf 'a\0b\377\355\240\200\n'", timeout_seconds=30).output
    assert output.startswith("a\0b")

    body = {"messages": [{"role": "user", "content": output}], "shell": None}
    append_step(claim=claim, step=Step(0, "observed", body))

    stored = JournalEntry.objects.get().body["messages"][0]["content"]
    assert stored == output.replace("\0", "\ufffd")


def test_a_hostile_answer_and_last_message_reach_the_evaluation() -> None:
    claim = held("run")

    finish_run(claim=claim, result=replace(run_result(), answer=HOSTILE, last_message=HOSTILE))

    rollout = Rollout.objects.get()
    assert (rollout.state, rollout.answer, rollout.last_message) == ("eval", CLEAN, CLEAN)


def test_no_answer_stays_no_answer() -> None:
    claim = held("run")

    finish_run(claim=claim, result=replace(run_result(), answer=None, last_message=""))

    rollout = Rollout.objects.get()
    assert (rollout.answer, rollout.last_message) == (None, "")


def test_reward_names_that_a_script_wrote_with_nul_bytes_are_scored() -> None:
    claim = held("eval")
    reward_json = b'{"reward": 0.5, "x\\u0000": 1, "y\\ud800": 2}'
    found = ScriptEvaluator().score({}, {}, script_artefacts(reward_json))
    assert set(found.rewards) == {"reward", "x\0", "y\ud800"}

    finish_eval(
        claim=claim,
        result=EvalResult(
            evaluator="script",
            reward=found.reward,
            rewards=dict(found.rewards),
            details=dict(found.details),
            log=found.log,
        ),
    )

    rollout = Rollout.objects.get()
    kept = {"reward": 0.5, "x\ufffd": 1.0, "y?": 2.0}
    assert (rollout.outcome, rollout.reward, rollout.rewards) == ("scored", 0.5, kept)
    assert Evaluation.objects.get().rewards == kept


def test_hostile_details_and_logs_of_an_evaluation_are_kept() -> None:
    claim = held("eval")

    result = replace(eval_result(), details={HOSTILE: [HOSTILE]}, log=HOSTILE)
    finish_eval(claim=claim, result=result)

    evaluation = Evaluation.objects.get()
    assert (evaluation.details, evaluation.log) == ({CLEAN: [CLEAN]}, CLEAN)
    assert Rollout.objects.get().outcome == "scored"


def test_a_hostile_failure_detail_is_kept_and_the_rollout_tried_again() -> None:
    claim = held("init")

    fail_attempt(claim=claim, code="sandbox.setup_failed", detail=HOSTILE)

    attempt = Attempt.objects.get(pk=claim.attempt_id)
    assert (attempt.state, attempt.failure_detail) == ("failed", CLEAN)
    assert Rollout.objects.get().state == "queued"


def test_a_hostile_failure_detail_ends_a_rollout_that_cannot_be_tried_again() -> None:
    claim = held("init")

    fail_attempt(claim=claim, code="sandbox.image_missing", detail=HOSTILE, retryable=False)

    rollout = Rollout.objects.get()
    assert (rollout.state, rollout.outcome) == ("done", "infra_failed")
    assert (rollout.failure_code, rollout.failure_detail) == ("sandbox.image_missing", CLEAN)


def test_a_failure_detail_is_cut_to_what_a_reader_wants() -> None:
    claim = held("init")

    fail_attempt(claim=claim, code="x", detail="\0" * 5000, retryable=False)

    assert Attempt.objects.get().failure_detail == "\ufffd" * 4000
    assert Rollout.objects.get().failure_detail == "\ufffd" * 4000
