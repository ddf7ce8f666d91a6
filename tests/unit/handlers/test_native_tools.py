"""The agent with native tool calls: several in a turn, malformed ones, resumed in between."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from rollouts.handlers.base import AgentResult, CommandInterrupted, Message
from rollouts.handlers.calls import INTERRUPTED
from rollouts.handlers.dialects import CUT_CALL, NO_CALL
from rollouts.handlers.native_tools import ToolsHandler
from rollouts.tools.cassettes import Cassettes
from rollouts.tools.search import WebSearchTool
from rollouts.tools.search_providers import SearchResult
from rollouts.tools.submit import SubmitTool
from tests.unit.handlers.episode_parts import ListJournal, Stage, assistant, user
from tests.unit.tools.scripted_shell import ScriptedShell, result

HANDLER = ToolsHandler()
ALL = ("bash", "think", "submit")


def call(name: str, **arguments: Any) -> str:
    """Return a call as the test's model writes it."""
    return f"{name} {json.dumps(arguments)}"


def turn(*calls: str, content: str = "", thought: str = "") -> str:
    """Return a turn with calls."""
    return "|".join([thought, content, *calls])


LS, PWD = call("bash", command="ls"), call("bash", command="pwd")
SUBMIT = turn(call("submit", answer="42"))


def stage_of(texts: list[str | Exception], **values: Any) -> Stage:
    """Return an episode with three tools, whose shell knows two commands."""
    shell = ScriptedShell(answers={"ls": result("a\n"), "pwd": result("/app\n")})
    return Stage(texts, **{"tools": ALL, "shell": shell, **values})


def run(stage: Stage) -> AgentResult:
    """Run the episode."""
    return HANDLER.run(stage.context)


def commands(stage: Stage) -> list[str]:
    """Return what the shell ran."""
    assert stage.shell is not None
    return stage.shell.commands


def answered(number: int, name: str, content: str) -> Message:
    """Return the result of a call."""
    return {"role": "tool", "tool_call_id": f"c{number}", "name": name, "content": content}


def test_calls_of_one_turn_run_in_their_order() -> None:
    stage = stage_of([turn(LS, call("think", thought="hm"), PWD, content="look"), SUBMIT])
    ended = run(stage)
    assert (ended.stop_reason, ended.answer, ended.turns) == ("finished", "42", 2)
    assert commands(stage) == ["ls", "pwd"]
    said, *seen = ended.messages[1:5]
    assert said["content"] == "look"
    assert [each["function"]["name"] for each in said["tool_calls"]] == ["bash", "think", "bash"]
    assert json.loads(said["tool_calls"][0]["function"]["arguments"]) == {"command": "ls"}
    assert seen == [
        answered(0, "bash", "a\n[exit code: 0]"),
        answered(1, "think", "Your thought is written down."),
        answered(2, "bash", "/app\n[exit code: 0]"),
    ]
    assert (ended.tool_calls, ended.tool_counts) == (3, {"bash": 2, "think": 1})
    assert stage.renderer.bridged == [seen]


def test_every_result_is_journaled_before_the_next_call() -> None:
    stage = stage_of([turn(LS, PWD), SUBMIT])
    run(stage)
    kinds = [event[:2] for event in stage.journal.events]
    assert kinds == [("sampled", 0), ("called", 0), ("observed", 0), ("sampled", 1)]
    assert stage.journal.events[1] == ("called", 0, 0, "after 1")


def test_thoughts_stand_apart_from_the_text() -> None:
    ended = run(stage_of([turn(LS, content="look", thought="let me see"), SUBMIT]))
    assert ended.messages[1]["reasoning_content"] == "let me see"


def test_malformed_calls_are_answered_and_counted() -> None:
    stage = stage_of(
        [turn("bash {", call("fly"), call("bash", command=7), LS), SUBMIT],
        settings={"max_malformed": 1},
    )
    ended = run(stage)
    seen = [message["content"] for message in ended.messages[2:6]]
    assert seen[0] == "The arguments are no JSON."
    assert seen[1] == "There is no tool named fly. Your tools are: bash, submit, think."
    assert seen[2].startswith("The arguments of bash are wrong at command: 7 is not of type")
    assert seen[3] == "a\n[exit code: 0]"
    assert (ended.stop_reason, ended.malformed_actions, ended.tool_calls) == ("finished", 3, 1)
    assert (ended.tool_counts, ended.tool_errors) == ({"bash": 1}, {"bash": 2, "unknown": 1})
    unread = ended.messages[1]["tool_calls"][0]["function"]
    assert unread == {"name": "bash", "arguments": "{}"}


def test_turns_of_malformed_calls_in_a_row_end_the_episode() -> None:
    bad = turn(call("fly"))
    ended = run(stage_of([bad, turn(LS), bad, bad], settings={"max_malformed": 2}))
    assert (ended.stop_reason, ended.turns, ended.malformed_actions) == ("malformed_action", 4, 3)
    assert ended.messages[-1]["role"] == "assistant"


def test_a_turn_without_a_call_is_the_answer_or_gets_a_nudge() -> None:
    ended = run(stage_of(["It is 7."]))
    assert (ended.stop_reason, ended.answer) == ("finished", "It is 7.")
    ended = run(stage_of(["It is 7.", SUBMIT], settings={"no_call": "nudge"}))
    assert ended.messages[1:3] == (assistant("It is 7."), user(NO_CALL))
    assert (ended.answer, ended.malformed_actions) == ("42", 1)


def test_a_turn_cut_before_its_call_is_no_answer() -> None:
    ended = run(stage_of(["I think " * 40, SUBMIT]))
    assert ended.messages[2] == user(CUT_CALL)
    assert (ended.stop_reason, ended.answer) == ("finished", "42")


def test_calls_above_the_bound_are_not_run() -> None:
    stage = stage_of([turn(LS, PWD), SUBMIT], settings={"max_calls": 1})
    ended = run(stage)
    assert commands(stage) == ["ls"]
    assert str(ended.messages[3]["content"]).startswith("Not run: a turn may hold 1 calls.")


def test_a_submission_ends_the_turn_before_later_calls() -> None:
    stage = stage_of([turn(LS, call("submit", answer="x"), PWD)])
    ended = run(stage)
    assert (ended.stop_reason, ended.answer, commands(stage)) == ("finished", "x", ["ls"])
    assert ended.messages[-1] == answered(0, "bash", "a\n[exit code: 0]")


def test_identical_turns_are_repetition() -> None:
    stage = stage_of([turn(LS, PWD)] * 3, settings={"max_repeats": 3})
    assert (run(stage).stop_reason, len(commands(stage))) == ("repetition", 4)


def test_time_in_tools_is_bounded() -> None:
    stage = stage_of([turn(LS, PWD)], budget={"tool_seconds": 3.0})
    assert stage.shell is not None
    stage.shell.after_run = lambda: setattr(stage, "now", stage.now + 3.0)
    ended = run(stage)
    assert (ended.stop_reason, commands(stage)) == ("agent_timeout", ["ls"])
    assert stage.shell.limits[0][0] == 3.0
    assert ended.messages[-1] == answered(0, "bash", "a\n[exit code: 0]")


TEXTS: list[str | Exception] = [turn(LS, PWD, LS), turn(call("fly")), SUBMIT]


def journal_after(called: int) -> ListJournal:
    """Return the journal of a worker that died in the first turn, after so many calls."""
    whole = stage_of(TEXTS)
    run(whole)
    first = whole.journal.turns[0]
    assert first.messages is not None
    cut = dataclasses.replace(first, messages=None, called=tuple(first.messages[:called]))
    return ListJournal(turns=[cut])


@pytest.mark.parametrize("called", [1, 2, 3])
def test_calls_whose_results_were_written_do_not_run_again(called: int) -> None:
    whole = stage_of(TEXTS)
    expected = run(whole)
    stage = stage_of(
        TEXTS[1:], journal=journal_after(called), settings={"interrupted_command": "report"}
    )
    ended = run(stage)
    assert commands(stage) == ["pwd", "ls"][called:]
    contents = [message["content"] for message in ended.messages[2:5]]
    if called < 3:
        assert contents[called] == INTERRUPTED
    else:
        assert ended.messages == expected.messages
    assert (ended.tool_calls, ended.tool_counts, ended.tool_errors) == (
        expected.tool_calls,
        expected.tool_counts,
        expected.tool_errors,
    )


def test_a_call_in_flight_goes_back_to_the_start_by_default() -> None:
    stage = stage_of([], journal=journal_after(1))
    with pytest.raises(CommandInterrupted, match="bash was in flight"):
        run(stage)
    assert commands(stage) == []


def test_a_resumed_episode_ends_as_the_whole_one_does() -> None:
    whole = stage_of(TEXTS)
    expected = run(whole)
    for done in (1, 2, 3):
        journal = ListJournal(turns=whole.journal.turns[:done])
        stage = stage_of(TEXTS[done:], journal=journal)
        ended = run(stage)
        assert ended == dataclasses.replace(expected, inference_seconds=2.0 * done)
        assert stage.trace.as_dict() == whole.trace.as_dict()
        assert commands(stage) == []


class Searching:
    """Find one page for any query, and count."""

    def __init__(self) -> None:
        self.queries: list[str] = []

    async def search(self, query: str, *, count: int) -> list[SearchResult]:  # noqa: ARG002
        self.queries.append(query)
        return [SearchResult(title=query, url="http://x", snippet="")]


def search(stage: Stage, *, most: int) -> tuple[AgentResult, list[str]]:
    """Run an episode that may search so often; return its end and what this worker asked for."""
    provider = Searching()
    tools = {
        "web_search": WebSearchTool(provider, cassettes=Cassettes(), max_calls=most),
        "submit": SubmitTool(),
    }
    ended = HANDLER.run(dataclasses.replace(stage.context, tools=tools))
    return ended, provider.queries


SEARCHES: list[str | Exception] = [
    turn(call("web_search", query="a"), call("web_search", query="b")),
    turn(call("web_search", query=" "), call("web_search"), call("web_search", query="c")),
    turn(call("web_search", query="d")),
    SUBMIT,
]


@pytest.mark.parametrize("done", range(4))
def test_the_bound_of_a_tools_calls_is_the_episodes(done: int) -> None:
    whole = Stage([*SEARCHES])
    expected, asked = search(whole, most=3)
    assert asked == ["a", "b", "c"]
    assert "All 3 calls of web_search" in expected.messages[-2]["content"]

    resumed = Stage(SEARCHES[done:], journal=ListJournal(turns=whole.journal.turns[:done]))
    ended, asked = search(resumed, most=3)

    assert ended.messages == expected.messages
    assert ended.tool_counts == expected.tool_counts
    assert asked == [["a", "b", "c"], ["c"], [], []][done]


def test_a_call_whose_effect_is_unknown_counts_as_made() -> None:
    whole = Stage([*SEARCHES])
    search(whole, most=9)
    in_flight = dataclasses.replace(whole.journal.turns[0], messages=None)
    settings = {"interrupted_command": "report"}
    stage = Stage([SEARCHES[2], SUBMIT], settings=settings, journal=ListJournal(turns=[in_flight]))

    ended, asked = search(stage, most=2)

    assert len(in_flight.called) == 1
    assert asked == []
    assert ended.messages[3]["content"] == INTERRUPTED
    assert "All 2 calls of web_search" in ended.messages[5]["content"]
