"""Evaluators in their own process: right answers, faults carried over, nothing left behind."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from evaluators import runner, wire
from evaluators.base import (
    Artefacts,
    EvaluatorCancelled,
    EvaluatorCrashed,
    EvaluatorTimeout,
    InvalidSettings,
    RewardMissing,
    Score,
    UnknownEvaluator,
)
from evaluators.script import ScriptEvaluator
from tests.script_left import script_artefacts

CATASTROPHIC = {"pattern": r"(a+)+$"}
ENDLESS = Artefacts(answer="a" * 60 + "b")


def scoring_children() -> list[int]:
    """Return the pids of this process's evaluator children that still exist."""
    found = []
    for child in psutil.Process().children(recursive=True):
        try:
            if "evaluators.child" in child.cmdline():
                found.append(child.pid)
        except psutil.NoSuchProcess:
            continue
    return found


def test_scores_like_the_evaluator_itself() -> None:
    result = runner.score(
        "exact", {"numeric": True}, {"answer": "7"}, Artefacts(answer="7.0"), timeout_seconds=30
    )
    assert result == Score(
        reward=1.0,
        rewards={"reward": 1.0, "accuracy": 1.0},
        details={"given": "7.0", "correct": True},
        log="given '7.0'",
    )


def test_reads_bytes_that_are_not_text() -> None:
    with pytest.raises(RewardMissing) as caught:
        runner.score("script", {}, {}, script_artefacts(log=b"\xff log"), timeout_seconds=30)
    assert caught.value.log == "\ufffd log"
    artefacts = script_artefacts(reward_txt=b"0.5\n")
    assert runner.score("script", {}, {}, artefacts, timeout_seconds=30).reward == 0.5


def test_an_evaluator_is_asked_for_its_next_sandbox_until_it_wants_none() -> None:
    payload = {"verifier_env": {"A": "\xe4"}}

    wanted = runner.advance("script", {"scope": "whole"}, payload, Artefacts(), timeout_seconds=30)

    assert wanted == ScriptEvaluator().next_phase({"scope": "whole"}, payload, Artefacts())
    left = script_artefacts(b'{"reward": 0.25}')
    found = runner.advance("script", {}, payload, left, timeout_seconds=30)
    assert isinstance(found, Score)
    assert found.reward == 0.25


def test_wrong_settings_come_back_as_themselves() -> None:
    with pytest.raises(InvalidSettings, match="pattern"):
        runner.score("regex", {}, {}, Artefacts(), timeout_seconds=30)


def test_an_unknown_name_starts_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)
    with pytest.raises(UnknownEvaluator, match="known are choice, ") as caught:
        runner.score("vibes", {}, {}, Artefacts(), timeout_seconds=30)
    assert caught.value.code == "evaluator.unknown"


def test_a_catastrophic_pattern_is_killed() -> None:
    with pytest.raises(EvaluatorTimeout) as caught:
        runner.score("regex", CATASTROPHIC, {}, ENDLESS, timeout_seconds=1.0)
    assert caught.value.code == "evaluator.timeout"
    assert scoring_children() == []


def test_a_cancelled_rollout_ends_the_process() -> None:
    asked: list[bool] = []

    def cancelled() -> bool:
        asked.append(True)
        return len(asked) > 2

    with pytest.raises(EvaluatorCancelled):
        runner.score("regex", CATASTROPHIC, {}, ENDLESS, timeout_seconds=120, cancelled=cancelled)
    assert len(asked) == 3
    assert scoring_children() == []


def test_the_child_ends_itself_when_nobody_kills_it() -> None:
    request = wire.pack_request("regex", CATASTROPHIC, {}, ENDLESS, backstop_seconds=0.5)
    done = subprocess.run(
        [sys.executable, "-m", "evaluators.child"],
        input=request,
        cwd=Path(runner.__file__).parent.parent,
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout) == (-signal.SIGALRM, b"")


def test_a_child_that_dies_is_a_crash() -> None:
    def kill_it() -> bool:
        for pid in scoring_children():
            psutil.Process(pid).kill()
        return False

    with pytest.raises(EvaluatorCrashed, match="status -9") as caught:
        runner.score("regex", CATASTROPHIC, {}, ENDLESS, timeout_seconds=120, cancelled=kill_it)
    assert caught.value.code == "evaluator.crashed"


def test_nonsense_from_the_child_is_a_crash() -> None:
    for data in (b"", b"{}", b"[]", b'{"fault": {"code": "other"}}', b'{"score": {}}'):
        with pytest.raises(EvaluatorCrashed):
            wire.unpack_outcome(data)
