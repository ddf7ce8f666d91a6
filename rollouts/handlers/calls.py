"""Carry out the tool calls of one turn, in their order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rollouts.handlers.base import (
    Action,
    AgentContext,
    AgentResult,
    CommandInterrupted,
    JournaledTurn,
    Message,
    StopReason,
)
from rollouts.handlers.episode import Episode
from rollouts.inference.parsed import ToolCall
from rollouts.tools.base import InvalidArguments, ToolContext, ToolResult
from sandboxes.runtime.exceptions import SandboxFault

INTERRUPTED = (
    "(the output is lost)\n"
    "[interrupted: the machine that watched this command failed while it ran; it may have had "
    "its effect in full, in part or not at all. Look before you run it again]"
)
HARMLESS = ("submit", "think")  # nothing is lost when one of these runs twice


def complaints(context: AgentContext, calls: Sequence[ToolCall], most: int) -> list[str]:
    """Return what is wrong with each call, in words the policy can act on; empty where nothing."""
    return [
        _complaint(context, call)
        if number < most
        else f"Not run: a turn may hold {most} calls. Call it again in the next turn."
        for number, call in enumerate(calls)
    ]


def carry_out(
    context: AgentContext,
    episode: Episode,
    action: Action,
    wrong: Sequence[str],
    journaled: JournaledTurn | None,
    *,
    on_interrupted: str,
) -> AgentResult | None:
    """Run the calls that an earlier worker did not; show the policy what came of all of them.

    Every call gets one tool message. Returns the episode's end, None when it goes on.
    """
    messages = [] if journaled is None else list(journaled.called)
    for number, call in enumerate(action.calls):
        if number < len(messages) or (journaled is not None and journaled.messages is not None):
            _count(episode, call, wrong[number])
            _count_made(context, call, wrong[number])
            continue
        content = wrong[number]
        in_flight = journaled is not None and number == len(journaled.called)
        if not content and in_flight and call.name not in HARMLESS:
            if on_interrupted == "restart":
                raise CommandInterrupted(f"{call.name} was in flight when the last worker died")
            content = INTERRUPTED
            _count_made(context, call, "")
        elif not content:
            episode.check_cancelled()
            if episode.tool_allowance() <= 0:
                episode.keep(messages)
                return episode.result(StopReason.AGENT_TIMEOUT)
            try:
                result = call_tool(context, episode, call)
            except SandboxFault:  # who ends the episode now shows what the others led to
                episode.keep(messages)
                raise
            if result.finished:
                episode.keep(messages)
                return episode.result(StopReason.FINISHED, result.answer)
            episode.check_cancelled()
            content = result.content
        _count(episode, call, wrong[number])
        messages.append(_answer(call, content))
        if number < len(action.calls) - 1:
            episode.called(number, messages[-1])
    if journaled is None or journaled.messages is None:
        episode.observe(messages)
    return None


def call_tool(context: AgentContext, episode: Episode, call: ToolCall) -> ToolResult:
    """Run one call within the time that is left; what the tool refuses is a result."""
    scope = ToolContext(
        shell=context.shell,
        sandbox=context.sandbox,
        timeout_seconds=max(0.0, episode.tool_allowance()),
        cancelled=context.cancelled,
    )
    began = context.clock()
    try:
        result = context.tools[call.name].call(call.arguments or {}, scope)
        return replace(result, content=context.mask(result.content))
    except InvalidArguments as error:
        episode.tool_errors[call.name] += 1
        return ToolResult(content=str(error))
    finally:
        episode.tool_seconds += context.clock() - began


def _complaint(context: AgentContext, call: ToolCall) -> str:
    if call.arguments is None:
        return call.complaint or "The call could not be read. Write it again."
    tool = context.tools.get(call.name)
    if tool is None:
        known = ", ".join(sorted(context.tools))
        return f"There is no tool named {call.name[:100]}. Your tools are: {known}."
    try:
        tool.check(call.arguments)
    except InvalidArguments as error:
        return str(error)
    return ""


def count_wrong(
    context: AgentContext, episode: Episode, calls: Sequence[ToolCall], wrong: Sequence[str]
) -> None:
    """Count malformed calls by tool; names that a policy made up are `unknown`."""
    for call, complaint in zip(calls, wrong, strict=True):
        if complaint:
            episode.malformed_actions += 1
            episode.tool_errors[call.name if call.name in context.tools else "unknown"] += 1


def _count(episode: Episode, call: ToolCall, complaint: str) -> None:
    if not complaint:
        episode.tool_calls += 1
        episode.tool_counts[call.name] += 1


def _count_made(context: AgentContext, call: ToolCall, complaint: str) -> None:
    """Let a tool count a call of an earlier worker, so that its bounds hold for the episode."""
    if not complaint:
        context.tools[call.name].count_made(call.arguments or {})


def _answer(call: ToolCall, content: str) -> Message:
    name = call.name or "unreadable"
    return {"role": "tool", "tool_call_id": call.id, "name": name, "content": content}
