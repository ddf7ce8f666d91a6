"""Carry a request to the evaluator's process and its outcome back, as JSON."""

from __future__ import annotations

import base64
import json
from dataclasses import asdict
from typing import Any, Literal

from evaluators import base
from evaluators.base import (
    Artefacts,
    Base,
    Command,
    EvaluatorCrashed,
    EvaluatorFault,
    JsonMap,
    Phase,
    PhaseResult,
    Ran,
    Score,
)

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
        base.JudgeUnavailable,
        base.JudgeRefused,
        base.JudgeAbstained,
    )
}

Kind = Literal["score", "advance"]
Outcome = Score | Phase | EvaluatorFault


def pack_request(
    name: str,
    settings: JsonMap,
    payload: JsonMap,
    artefacts: Artefacts,
    backstop_seconds: float,
    *,
    kind: Kind = "score",
) -> bytes:
    """Return the request; bytes travel as base64."""
    body = {
        "kind": kind,
        "name": name,
        "settings": dict(settings),
        "payload": dict(payload),
        "backstop_seconds": backstop_seconds,
        "artefacts": pack_artefacts(artefacts),
    }
    return json.dumps(body).encode()


def unpack_request(data: bytes) -> tuple[Kind, str, JsonMap, JsonMap, Artefacts, float]:
    """Return kind, name, settings, payload, artefacts and the backstop in seconds."""
    body = json.loads(data)
    artefacts = unpack_artefacts(body["artefacts"])
    names = ("kind", "name", "settings", "payload")
    kind, name, settings, payload = (body[each] for each in names)
    return kind, name, settings, payload, artefacts, body["backstop_seconds"]


def pack_artefacts(artefacts: Artefacts) -> dict[str, Any]:
    """Return artefacts as JSON-able values."""
    body = {
        name: getattr(artefacts, name)
        for name in Artefacts.__dataclass_fields__
        if name != "phases"
    }
    body["messages"] = list(artefacts.messages)
    body["phases"] = [_pack_result(each) for each in artefacts.phases]
    return body


def unpack_artefacts(body: JsonMap) -> Artefacts:
    """Return artefacts; raises KeyError, TypeError, ValueError for what is none."""
    fields = dict(body)
    fields["messages"] = tuple(fields["messages"])
    fields["phases"] = tuple(_unpack_result(each) for each in fields["phases"])
    return Artefacts(**fields)


def pack_outcome(outcome: Outcome) -> bytes:
    """Return a score, a phase or a fault as JSON."""
    if isinstance(outcome, EvaluatorFault):
        fault = {
            "code": outcome.code,
            "message": str(outcome),
            "log": outcome.log,
            "is_graders": outcome.is_graders,
        }
        return json.dumps({"fault": fault}).encode()
    if isinstance(outcome, Phase):
        return json.dumps({"phase": pack_phase(outcome)}).encode()
    score = {
        "reward": outcome.reward,
        "rewards": dict(outcome.rewards),
        "details": dict(outcome.details),
        "log": outcome.log,
        "turn_rewards": list(outcome.turn_rewards),
    }
    return json.dumps({"score": score}, allow_nan=False).encode()


def unpack_outcome(data: bytes) -> Score | Phase:
    """Return the score or phase; raise the fault that it carries.

    Raises `EvaluatorCrashed` for nonsense.
    """
    try:
        body: dict[str, Any] = json.loads(data)
        if "phase" in body:
            return _unpack_phase(body["phase"])
        if "fault" not in body:
            return Score(**body["score"])
        raised = _unpack_fault(**body["fault"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise EvaluatorCrashed(f"the evaluator answered nonsense: {data[:200]!r}") from error
    raise raised


def _unpack_fault(*, code: str, message: str, log: str, is_graders: bool) -> EvaluatorFault:
    """Return the fault; a plug-in's own kind comes back as one with the same code."""
    known = FAULTS.get(code)
    if known is None:
        values = {"code": str(code), "is_graders": bool(is_graders)}
        known = type("ReportedFault", (EvaluatorFault,), values)
    return known(message, log=log)


def pack_phase(phase: Phase) -> dict[str, Any]:
    """Return a phase as JSON-able values."""
    return {
        "name": phase.name,
        "base": phase.base.value,
        "workspace": list(phase.workspace),
        "files": {path: [_to_base64(data), mode] for path, (data, mode) in phase.files.items()},
        "tests": phase.tests,
        "commands": [
            {**asdict(each), "argv": list(each.argv), "stdin": _to_base64(each.stdin)}
            for each in phase.commands
        ],
        "collect": dict(phase.collect),
        "log": phase.log,
        "network": phase.network,
    }


def _unpack_phase(body: JsonMap) -> Phase:
    commands = (
        Command(**{**each, "argv": tuple(each["argv"]), "stdin": _from_base64(each["stdin"])})
        for each in body["commands"]
    )
    files = {path: (_from_base64(data), mode) for path, (data, mode) in body["files"].items()}
    values = {
        "base": Base(body["base"]),
        "workspace": tuple(body["workspace"]),
        "files": files,
        "commands": tuple(commands),
    }
    return Phase(**{**body, **values})


def _pack_result(result: PhaseResult) -> dict[str, Any]:
    return {
        "name": result.name,
        "commands": [
            {
                **asdict(each),
                "stdout": _to_base64(each.stdout),
                "stderr": _to_base64(each.stderr),
            }
            for each in result.commands
        ],
        "files": {
            path: None if data is None else _to_base64(data) for path, data in result.files.items()
        },
    }


def _unpack_result(body: JsonMap) -> PhaseResult:
    commands = (
        Ran(
            **{
                **each,
                "stdout": _from_base64(each["stdout"]),
                "stderr": _from_base64(each["stderr"]),
            }
        )
        for each in body["commands"]
    )
    files = {
        path: None if text is None else _from_base64(text) for path, text in body["files"].items()
    }
    return PhaseResult(name=body["name"], commands=tuple(commands), files=files)


def _to_base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _from_base64(text: str) -> bytes:
    return base64.b64decode(text)
