"""A finished rollout in the reference's words: the result that `/process` answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollouts.api.reference.messages import plain_messages, token_messages
from rollouts.states import Outcome, Stage, StopReason

JSON = dict[str, Any]

# How the reference names what ended an episode; its trainers mask what has an error, except that
# a result is not filtered for an AgentToolCallError: those samples are trained on.
TRAINED = "AgentToolCallError"
ERRORS: Mapping[str, str] = {
    StopReason.MAX_TURNS: "RuntimeError: Agent reached maximum iteration.",
    StopReason.MAX_TOKENS: "AgentFormatError: the episode's tokens are used up",
    StopReason.CONTEXT_FULL: "ContextWindowExceededError: the context is full",
    StopReason.AGENT_TIMEOUT: "TimeoutError: Operation timed out",
    StopReason.MALFORMED_ACTION: f"{TRAINED}: the last action could not be read",
    StopReason.REPETITION: "AgentStuckInLoopError: Agent got stuck in a loop",
    StopReason.POLICY_LAG: "PolicyLagError: the policy's version moved on",
    StopReason.SANDBOX_LIMIT: "RuntimeError: the sandbox ended at its limit",
}
_TIMEOUTS = {StopReason.AGENT_TIMEOUT}


@dataclass(frozen=True, kw_only=True)
class Finished:
    """What is known of a rollout that is done.

    `trajectory` has the API's shape; `failed_stage` is where a failed one broke; `lost` says why
    a stored trajectory cannot be read.
    """

    outcome: str
    stop_reason: str | None
    reward: float | None
    rewards: Mapping[str, float]
    answer: str | None
    failure_code: str
    failure_detail: str
    failed_stage: str | None
    timings: Mapping[str, float]
    trajectory: Mapping[str, Any]
    details: Mapping[str, Any]
    lost: str = ""


def result(
    done: Finished,
    *,
    instance: Mapping[str, Any],
    resolved_above: float,
    patch: bool,
    with_tokens: bool,
    input_ids: bool,
) -> JSON:
    """Return the result; every field of the reference is there, `reward` and counts beside them.

    Of a trajectory with several segments the last one is told: its first message holds all the
    ids of what the policy saw there, and earlier turns are in it, not trained on.
    """
    error, critical = _error(done), _critical(done)
    resolved = done.reward is not None and done.reward > resolved_above
    traceback = {} if critical is None else {"traceback": done.failure_detail}
    return {
        "instance_id": instance.get("instance_id"),
        "trajectory_id": instance.get("trajectory_id"),
        "git_patch": done.answer if patch else None,
        "success": error is None,
        "error": error,
        **traceback,
        "finish": done.stop_reason == StopReason.FINISHED,
        "messages": _messages(done.trajectory, with_tokens=with_tokens, input_ids=input_ids),
        "tools": list(done.trajectory.get("tools", [])),
        "end_properly": done.stop_reason != StopReason.MALFORMED_ACTION,
        "resolved": resolved,
        "critical_error": critical,
        "filter": _filtered(error, critical),
        "report": {
            "resolved": resolved,
            "reward": done.reward,
            "rewards": dict(done.rewards),
            **({"details": dict(done.details)} if done.details else {}),
        },
        "reward": done.reward,
        "segments": len(done.trajectory.get("segments", [])),
        "policy_version": done.trajectory.get("policy_version"),
        "timing": _timing(done.timings, timed_out=critical == "timeout"),
    }


def _error(done: Finished) -> str | None:
    if done.lost:
        return f"Error in final result: {done.lost}"
    match done.outcome:
        case Outcome.CANCELLED:
            return "CancelledError: Operation cancelled"
        case Outcome.SCORED:
            return ERRORS.get(done.stop_reason or "")
    stage = done.failed_stage or Stage.INIT.value
    where = "run agent" if stage == Stage.RUN else stage
    return f"Error in {where}: {done.failure_code}: {done.failure_detail}"


def _critical(done: Finished) -> str | None:
    if done.outcome == Outcome.TIMED_OUT or done.stop_reason in _TIMEOUTS:
        return "timeout"
    if done.lost:
        return "final_result"
    if done.outcome == Outcome.INFRA_FAILED:
        return done.failed_stage or Stage.INIT.value
    return None


def _filtered(error: str | None, critical: str | None) -> bool:
    """Tell whether the reference would keep a result from training."""
    if critical is not None:
        return True
    return error is not None and TRAINED not in error


def _messages(trajectory: Mapping[str, Any], *, with_tokens: bool, input_ids: bool) -> list[JSON]:
    messages: Sequence[Mapping[str, Any]] = trajectory.get("messages", [])
    segments: Sequence[Mapping[str, Any]] = trajectory.get("segments", [])
    if not with_tokens or not segments:
        return plain_messages(messages)
    return token_messages(messages, segments[-1], input_ids=input_ids)


def _timing(timings: Mapping[str, float], *, timed_out: bool) -> JSON:
    """Return seconds by phase, under the names of its code and of its documentation."""
    init, run, graded = (float(timings.get(stage, 0.0)) for stage in Stage.values)
    others = sum(seconds for name, seconds in timings.items() if name.startswith("queue_"))
    return {
        "init_time": init,
        "run_time": run,
        "eval_time": graded,
        "others_time": others,
        "counted_elapsed": init + run + graded,
        "timeout_triggered": timed_out,
        "init": init,
        "run": run,
        "eval": graded,
        "others": others,
        "timeout": timed_out,
    }
