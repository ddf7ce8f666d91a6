"""Requests and outcomes as they cross to the evaluator's process and back."""

from __future__ import annotations

import json

import pytest

from evaluators import wire
from evaluators.base import (
    Artefacts,
    Base,
    Command,
    EvaluatorCrashed,
    EvaluatorFault,
    Phase,
    PhaseResult,
    Ran,
    RewardMalformed,
    Score,
)

PHASE = Phase(
    name="tests",
    base=Base.PREPARED,
    workspace=("/app",),
    files={"/tmp/patch": (b"\xff\0", 0o755)},
    tests=True,
    commands=(Command(argv=("git", "apply"), stdin=b"\xfe", env={"A": "b"}, seconds=3.5),),
    collect={"/out": 10, "/folder/": 20},
    log="/log",
    network=True,
)
ARTEFACTS = Artefacts(
    answer="\udcff",
    last_message="done",
    messages=({"role": "user", "content": "Say it."},),
    turns=2,
    tokens=30,
    stop_reason="finished",
    instruction="Say it.",
    phases=(
        PhaseResult(
            name="tests",
            commands=(
                Ran(exit_code=None, stdout=b"\xff", stderr=b"", seconds=1.5, timed_out=True),
            ),
            files={"/out": b"\0", "/gone": None},
        ),
    ),
)


class OwnFault(EvaluatorFault):
    """A plug-in's own."""

    code = "evaluator.own"
    is_graders = True


def test_artefacts_arrive_as_they_were() -> None:
    request = wire.pack_request("x", {"a": 1}, {"b": [2]}, ARTEFACTS, 5.0, kind="advance")

    assert wire.unpack_request(request) == ("advance", "x", {"a": 1}, {"b": [2]}, ARTEFACTS, 5.0)


def test_a_phase_arrives_as_it_was() -> None:
    assert wire.unpack_outcome(wire.pack_outcome(PHASE)) == PHASE


def test_a_score_arrives_as_it_was() -> None:
    score = Score(reward=0.5, rewards={"reward": 0.5}, details={"a": [1]}, log="x")

    assert wire.unpack_outcome(wire.pack_outcome(score)) == score


def test_a_fault_of_a_plug_in_keeps_its_code_and_whose_it_is() -> None:
    with pytest.raises(EvaluatorFault, match="no server") as caught:
        wire.unpack_outcome(wire.pack_outcome(OwnFault("no server", log="said")))

    fault = caught.value
    assert (fault.code, fault.is_graders, fault.log) == ("evaluator.own", True, "said")


@pytest.mark.parametrize(
    "score",
    [
        {"reward": float("nan"), "rewards": {}},
        {"reward": True, "rewards": {}},
        {"reward": "1", "rewards": {}},
        {"reward": 1, "rewards": {"a": {"b": 1}}},
        {"reward": 1, "rewards": {"": 1}},
        {"reward": 1, "rewards": {}, "details": {"a": "x" * 70_000}},
    ],
)
def test_a_score_that_breaks_the_schema_is_none(score: dict[str, object]) -> None:
    with pytest.raises(RewardMalformed):
        wire.unpack_outcome(json.dumps({"score": score}).encode())


@pytest.mark.parametrize(
    "data",
    [b'{"phase": {}}', b'{"phase": 1}', b'{"score": 1}', b'{"fault": []}', b'{"score": {"a": 1}}'],
)
def test_nonsense_is_a_crash(data: bytes) -> None:
    with pytest.raises(EvaluatorCrashed):
        wire.unpack_outcome(data)
