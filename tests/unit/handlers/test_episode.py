"""What an episode does when templates, contexts, time and policies are not the usual ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from rollouts.handlers.base import (
    Action,
    AgentCancelled,
    AgentContext,
    AgentHandler,
    AgentResult,
    Message,
    PolicyLagExceeded,
    StopReason,
)
from rollouts.handlers.bash_block import BashBlockHandler
from rollouts.handlers.command_line import CommandLineHandler
from rollouts.handlers.drive import drive
from rollouts.handlers.native_tools import ToolsHandler
from rollouts.handlers.single_turn import SingleTurnHandler
from rollouts.inference.exceptions import ContextFull, NoServer
from rollouts.inference.parsed import ParsedTurn, ToolCall
from rollouts.inference.protocol import ChatAnswer
from tests.unit.handlers.episode_parts import ListJournal, Stage, assistant, said, user
from tests.unit.tools.scripted_shell import ScriptedShell, result

LINE = CommandLineHandler()


def test_a_template_that_cannot_be_extended_forks_the_trace() -> None:
    stage = Stage(["ls", "submit"], shell=ScriptedShell(answers={"ls": result("a")}))
    stage.renderer.cannot_extend = True
    assert LINE.run(stage.context).stop_reason == "finished"
    first, second = stage.trace.as_dict()
    assert (first["fork_reason"], second["fork_reason"]) == (None, "template_rewrites_history")
    assert (second["parent"], second["prompt_ids"]) == (0, stage.model.prompts[1])
    assert stage.renderer.rendered[1] == [
        user("do it"),
        assistant("ls"),
        user("a\n[exit code: 0]"),
    ]


COMMANDS: list[str | Exception] = ["a", "b", "c", "d", "e", "submit"]


def long_stage(policy: str, texts: list[str | Exception], journal: ListJournal) -> Stage:
    """Return an episode whose outputs of 300 characters soon fill a context of 1,200 tokens."""
    shell = ScriptedShell(answers={name: result(name * 300) for name in "abcde"})
    return Stage(
        texts,
        shell=shell,
        journal=journal,
        settings={"context_policy": policy},
        budget={"context_tokens": 1200},
    )


@pytest.mark.parametrize(
    ("policy", "reason"), [("truncate", "truncated"), ("compact", "compacted")]
)
def test_a_full_context_is_made_shorter(policy: str, reason: str) -> None:
    stage = long_stage(policy, COMMANDS, ListJournal())
    ended = LINE.run(stage.context)
    assert (ended.stop_reason, ended.turns) == ("finished", 6)
    assert max(map(len, stage.model.prompts)) <= 1200
    forks = [segment["fork_reason"] for segment in stage.trace.as_dict()]
    assert forks == [None, reason]
    assert sum(sum(s["response_mask"]) for s in stage.trace.as_dict()) == ended.sampled_tokens
    shown = stage.renderer.rendered[-1]
    assert shown[0] == user("do it")
    assert shown[-1]["content"].startswith("ddd")
    assert len(ended.messages) == 12
    if policy == "compact":
        assert shown[2] == user("[315 characters of earlier output were left out]")


@pytest.mark.parametrize("policy", ["truncate", "compact"])
@pytest.mark.parametrize("done", [3, 4, 5])
def test_a_shorter_conversation_goes_on_as_it_was(policy: str, done: int) -> None:
    whole = long_stage(policy, COMMANDS, ListJournal())
    LINE.run(whole.context)
    stage = long_stage(policy, COMMANDS[done:], ListJournal(turns=whole.journal.turns[:done]))
    LINE.run(stage.context)
    assert stage.model.prompts == whole.model.prompts[done:]
    assert stage.trace.as_dict() == whole.trace.as_dict()


@pytest.mark.parametrize("policy", ["truncate", "compact"])
def test_a_conversation_that_cannot_get_shorter_ends(policy: str) -> None:
    shell = ScriptedShell(answers={"a": result("a" * 2000)})
    stage = Stage(["a"], shell=shell, settings={"context_policy": policy})
    stage.budget = {"context_tokens": 1200}
    assert LINE.run(stage.context).stop_reason == "context_full"


def test_a_server_with_a_smaller_context_is_asked_again_with_less() -> None:
    texts: list[str | Exception] = ["a", "b", ContextFull("too long"), "submit"]
    stage = long_stage("truncate", texts, ListJournal())
    stage.budget = {}
    assert LINE.run(stage.context).stop_reason == "finished"
    assert len(stage.model.prompts[3]) < len(stage.model.prompts[2])


def test_a_turn_that_the_end_of_time_cut_is_kept() -> None:
    stage = Stage(["ls"])
    cut = dataclasses.replace(said("ls", 2), finish_reason="abort")
    context = dataclasses.replace(stage.context, generate=lambda *_: cut)
    ended = LINE.run(context)
    assert (ended.stop_reason, ended.sampled_tokens, ended.tool_calls) == ("agent_timeout", 2, 0)
    assert stage.trace.as_dict()[0]["turns"][0]["finish_reason"] == "abort"
    again = Stage([], journal=stage.journal)
    assert LINE.run(again.context).stop_reason == "agent_timeout"


def test_nothing_sampled_until_the_end_of_time_leaves_no_turn() -> None:
    stage = Stage([])
    cut = dataclasses.replace(said("ls", 0), finish_reason="abort")
    context = dataclasses.replace(stage.context, generate=lambda *_: cut)
    ended = LINE.run(context)
    assert (ended.stop_reason, ended.turns, stage.trace.turns) == ("agent_timeout", 0, 0)
    assert stage.journal.turns == []


def test_an_answer_that_was_cut_is_an_answer_all_the_same() -> None:
    stage = Stage([], shell=None)
    cut = dataclasses.replace(said("it is 7"), finish_reason="abort")
    context = dataclasses.replace(stage.context, generate=lambda *_: cut)
    ended = SingleTurnHandler().run(context)
    assert (ended.stop_reason, ended.answer) == ("agent_timeout", "it is 7")


def test_policy_lag_ends_the_episode() -> None:
    ended = LINE.run(Stage(["ls", PolicyLagExceeded("too many versions")]).context)
    assert (ended.stop_reason, ended.turns) == ("policy_lag", 1)


class TextPolicy:
    """Say one parsed turn after another, and keep what was asked."""

    def __init__(self, *turns: ParsedTurn | Exception) -> None:
        self.turns = list(turns)
        self.asked: list[tuple[list[Message], list[str], int]] = []

    def __call__(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], max_tokens: int
    ) -> ChatAnswer:
        names = [str(tool["function"]["name"]) for tool in tools]
        self.asked.append(([dict(message) for message in messages], names, max_tokens))
        turn = self.turns.pop(0)
        if isinstance(turn, Exception):
            raise turn
        return ChatAnswer(turn, "stop", "s", 2.0, sampled_tokens=5)


LS = ParsedTurn("look", "hm", (ToolCall("x1", "bash", {"command": "ls"}),))
END = ParsedTurn("", None, (ToolCall("x2", "submit", {"answer": "42"}),))


def test_a_text_only_policy_calls_tools() -> None:
    policy = TextPolicy(LS, END)
    stage = Stage([], chat=policy, shell=ScriptedShell(answers={"ls": result("a\n")}))
    ended = ToolsHandler().run(stage.context)
    assert (ended.stop_reason, ended.answer, ended.turns) == ("finished", "42", 2)
    assert (ended.sampled_tokens, stage.trace.as_dict()) == (10, [])
    first, second = policy.asked
    assert first == ([user("do it")], ["bash", "submit"], 200)
    assert second[0] == list(ended.messages[:3])
    assert second[0][1]["tool_calls"][0]["id"] == second[0][2]["tool_call_id"] == "x1"


@pytest.mark.parametrize("done", [1, 2])
def test_a_text_only_episode_goes_on_from_its_journal(done: int) -> None:
    whole = Stage([], chat=TextPolicy(LS, END))
    expected = ToolsHandler().run(whole.context)
    policy = TextPolicy(*[LS, END][done:])
    journal = ListJournal(turns=whole.journal.turns[:done])
    ended = ToolsHandler().run(Stage([], chat=policy, journal=journal).context)
    assert ended == dataclasses.replace(expected, inference_seconds=2.0 * done)


def test_a_text_only_policy_writes_blocks() -> None:
    policy = TextPolicy(ParsedTurn("```bash\nsubmit 7\n```"))
    stage = Stage([], chat=policy)
    ended = BashBlockHandler().run(stage.context)
    assert (ended.answer, policy.asked[0][1]) == ("7", [])
    again = BashBlockHandler().run(Stage([], chat=TextPolicy(), journal=stage.journal).context)
    assert again.messages == ended.messages


def test_a_text_only_context_is_made_shorter_or_ends() -> None:
    texts = [ParsedTurn(f"```bash\n{name}\n```") for name in "abcd"]
    policy = TextPolicy(*texts, ContextFull("full"), ParsedTurn("```bash\nsubmit\n```"))
    stage = Stage([], chat=policy, settings={"context_policy": "truncate"})
    assert BashBlockHandler().run(stage.context).stop_reason == "finished"
    assert len(policy.asked[5][0]) < len(policy.asked[4][0])
    stage = Stage([], chat=TextPolicy(ContextFull("full")))
    assert BashBlockHandler().run(stage.context).stop_reason == "context_full"


def test_actions_of_older_releases_stay_readable() -> None:
    assert Action.from_dict({"kind": "command", "text": "ls"}) == Action(kind="command", text="ls")


class Hooked(AgentHandler):
    """Write down which hooks ran."""

    name, description, needs_sandbox = "hooked", "hooked", False

    def __init__(self, fault: Exception | None = None, takes_on: bool = False) -> None:
        self.fault, self.takes_on = fault, takes_on
        self.ran: list[str] = []

    def validate(self, settings: Mapping[str, Any]) -> None:
        raise NotImplementedError

    def prepare(self, context: AgentContext) -> None:  # noqa: ARG002
        self.ran.append("prepare")

    def run(self, context: AgentContext) -> AgentResult:  # noqa: ARG002
        self.ran.append("run")
        if self.fault:
            raise self.fault
        return AgentResult(stop_reason=StopReason.FINISHED, answer="a")

    def conclude(
        self,
        context: AgentContext,  # noqa: ARG002
        result: AgentResult,
    ) -> AgentResult:
        self.ran.append("conclude")
        return dataclasses.replace(result, answer="b")

    def on_fault(
        self,
        context: AgentContext,  # noqa: ARG002
        fault: Exception,
    ) -> AgentResult | None:
        self.ran.append(type(fault).__name__)
        if self.takes_on:
            return AgentResult(stop_reason=StopReason.FINISHED, answer="c")
        return None


def test_hooks_run_in_their_order() -> None:
    handler = Hooked()
    assert drive(handler, Stage([]).context).answer == "b"
    assert handler.ran == ["prepare", "run", "conclude"]


def test_a_fault_passes_unless_the_agent_takes_it_on() -> None:
    with pytest.raises(NoServer):
        drive(Hooked(NoServer("none")), Stage([]).context)
    handler = Hooked(NoServer("none"), takes_on=True)
    assert drive(handler, Stage([]).context).answer == "c"
    assert handler.ran == ["prepare", "run", "NoServer"]


def test_a_cancelled_rollout_is_nothing_to_take_on() -> None:
    for fault, cancelled in ((AgentCancelled("c"), False), (NoServer("none"), True)):
        handler = Hooked(fault, takes_on=True)
        stage = Stage([], is_cancelled=cancelled)
        with pytest.raises(type(fault)):
            drive(handler, stage.context)
        assert handler.ran == ["prepare", "run"]
