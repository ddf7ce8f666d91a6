"""Carry a scoring request to the child process and its outcome back, as JSON lines."""

from __future__ import annotations

import base64
import json
from typing import Any

from evaluators import base
from evaluators.base import Artefacts, EvaluatorCrashed, EvaluatorFault, JsonMap, Score

FAULTS: dict[str, type[EvaluatorFault]] = {
    fault.code: fault
    for fault in (
        base.RewardMissing,
        base.RewardMalformed,
        base.RewardOutOfRange,
        base.EvaluatorTimeout,
        base.UnknownEvaluator,
        base.EvaluatorCancelled,
        base.EvaluatorCrashed,
        base.InvalidSettings,
    )
}


def pack_request(
    name: str, settings: JsonMap, payload: JsonMap, artefacts: Artefacts, backstop_seconds: float
) -> bytes:
    """Return the request; bytes travel as base64."""
    body = {
        "name": name,
        "settings": dict(settings),
        "payload": dict(payload),
        "backstop_seconds": backstop_seconds,
        "artefacts": {
            "answer": artefacts.answer,
            "last_message": artefacts.last_message,
            "reward_json": _to_base64(artefacts.reward_json),
            "reward_txt": _to_base64(artefacts.reward_txt),
            "test_log": artefacts.test_log,
            "exit_code": artefacts.exit_code,
        },
    }
    return json.dumps(body).encode()


def unpack_request(data: bytes) -> tuple[str, JsonMap, JsonMap, Artefacts, float]:
    """Return name, settings, payload, artefacts and the backstop in seconds."""
    body = json.loads(data)
    fields = dict(body["artefacts"])
    fields["reward_json"] = _from_base64(fields["reward_json"])
    fields["reward_txt"] = _from_base64(fields["reward_txt"])
    artefacts = Artefacts(**fields)
    return body["name"], body["settings"], body["payload"], artefacts, body["backstop_seconds"]


def pack_outcome(outcome: Score | EvaluatorFault) -> bytes:
    """Return a score or a fault as JSON."""
    if isinstance(outcome, EvaluatorFault):
        fault = {"code": outcome.code, "message": str(outcome), "log": outcome.log}
        return json.dumps({"fault": fault}).encode()
    score = {
        "reward": outcome.reward,
        "rewards": dict(outcome.rewards),
        "details": dict(outcome.details),
        "log": outcome.log,
    }
    return json.dumps({"score": score}, allow_nan=False).encode()


def unpack_outcome(data: bytes) -> Score:
    """Return the score; raise the fault that it carries, or `EvaluatorCrashed` for nonsense."""
    try:
        body: dict[str, Any] = json.loads(data)
        if "fault" not in body:
            return Score(**body["score"])
        fault = body["fault"]
        raised = FAULTS[fault["code"]](fault["message"], log=fault["log"])
    except (ValueError, KeyError, TypeError) as error:
        raise EvaluatorCrashed(f"the evaluator answered nonsense: {data[:200]!r}") from error
    raise raised


def _to_base64(data: bytes | None) -> str | None:
    return None if data is None else base64.b64encode(data).decode()


def _from_base64(text: str | None) -> bytes | None:
    return None if text is None else base64.b64decode(text)
