"""The one-line agent: messages, token ids, limits and stop reasons."""

from __future__ import annotations

from typing import Any

import pytest

from rollouts.handlers.base import (
    Action,
    AgentCancelled,
    AgentResult,
    InvalidAgentSettings,
    StopReason,
)
from rollouts.handlers.command_line import CommandLineHandler
from rollouts.handlers.one_line import CUT_OFF, NO_COMMAND
from rollouts.inference.exceptions import ContextFull, NoServer
from sandboxes.runtime.exceptions import SandboxGone
from tests.unit.handlers.episode_parts import (
    ASSISTANT,
    END,
    ODD,
    SYSTEM,
    USER,
    Stage,
    assistant,
    said,
    user,
)
from tests.unit.tools.scripted_shell import ScriptedShell, result

HANDLER = CommandLineHandler()
DEMONSTRATIONS = [
    [user("make apple"), assistant("touch apple"), user("(no output)"), assistant("submit")],
    [user("add 1 and 2"), assistant("submit 3")],
]


def run(stage: Stage) -> AgentResult:
    """Run the episode."""
    return HANDLER.run(stage.context)


def shell(**answers: Any) -> ScriptedShell:
    """Return a shell with answers."""
    return ScriptedShell(answers=answers)


def ids(text: str) -> list[int]:
    """Return the ids that the renderer gives to a text."""
    return [ord(character) for character in text]


def odd(text: str) -> list[int]:
    """Return the ids that the model samples for a text."""
    return [ODD + ord(character) for character in text]


def test_an_episode_from_demonstration_to_submission() -> None:
    stage = Stage(
        ["ls\nand then I look", "submit 42"],
        shell=shell(ls=result("a b\n")),
        settings={"demonstrations": DEMONSTRATIONS, "instruction_template": "Task: {instruction}!"},
        system_prompt="Be brief.",
        instruction="use {instruction} {x}",
    )
    assert run(stage) == AgentResult(
        stop_reason=StopReason.FINISHED,
        answer="42",
        messages=(
            {"role": "system", "content": "Be brief."},
            *DEMONSTRATIONS[0],
            *DEMONSTRATIONS[1],
            user("Task: use {instruction} {x}!"),
            assistant("ls\nand then I look"),
            user("a b\n[exit code: 0]"),
            assistant("submit 42"),
        ),
        turns=2,
        sampled_tokens=len("ls\nand then I look") + 1 + len("submit 42") + 1,
        tool_calls=1,
        tool_counts={"bash": 1},
    )
    assert stage.shell is not None
    assert stage.shell.commands == ["ls"]


def test_what_was_sampled_is_never_tokenised_again() -> None:
    stage = Stage(
        ["ls", "submit"], shell=shell(ls=result("ok")), system_prompt="s", instruction="go"
    )
    run(stage)
    first = [SYSTEM, *ids("s"), END, USER, *ids("go"), END, ASSISTANT]
    observed = [USER, *ids("ok\n[exit code: 0]"), END, ASSISTANT]
    assert stage.model.prompts == [first, [*first, *odd("ls"), END, *observed]]
    assert len(stage.renderer.rendered) == 1
    assert stage.renderer.bridged == [[user("ok\n[exit code: 0]")]]
    (segment,) = stage.trace.as_dict()
    assert segment["prompt_ids"] == first
    assert segment["response_ids"] == [*odd("ls"), END, *observed, *odd("submit"), END]
    assert segment["response_mask"] == [1] * 3 + [0] * len(observed) + [1] * 7
    assert segment["policy_versions"] == [[7, len(segment["response_ids"])]]


def test_each_turn_is_journaled_before_and_after_its_tool() -> None:
    stage = Stage(["ls", "", "submit"])
    events = stage.journal.events
    assert stage.shell is not None
    stage.shell.after_run = lambda: events.append(("ran",))
    run(stage)
    assert events == [
        ("sampled", 0, Action(kind="command", text="ls")),
        ("ran",),
        ("observed", 0, "after 1"),
        ("sampled", 1, Action(kind="malformed", text=NO_COMMAND)),
        ("observed", 1, "after 1"),
        ("sampled", 2, Action(kind="submit", text=None)),
    ]


def test_a_submission_without_an_answer() -> None:
    stopped = run(Stage(["submit"]))
    assert (stopped.stop_reason, stopped.answer, stopped.tool_calls) == ("finished", None, 0)


def test_malformed_answers_are_explained_and_then_end_the_episode() -> None:
    stage = Stage(["", "ls", " ", "", "\n"])
    stopped = run(stage)
    assert (stopped.stop_reason, stopped.malformed_actions, stopped.turns) == (
        "malformed_action",
        4,
        5,
    )
    assert stopped.messages == (
        user("do it"),
        assistant(""),
        user(NO_COMMAND),
        assistant("ls"),
        user("(no output)\n[exit code: 0]"),
        assistant(" "),
        user(NO_COMMAND),
        assistant(""),
        user(NO_COMMAND),
        assistant("\n"),
    )


def test_the_number_of_malformed_answers_is_settable() -> None:
    stopped = run(Stage([""], settings={"max_malformed": 1}))
    assert (stopped.stop_reason, stopped.turns) == ("malformed_action", 1)


def test_a_line_cut_by_the_turn_limit_is_not_run() -> None:
    stage = Stage(["rm -rf /app/tmp", "ls\nand more talk", "submit"], budget={"turn_tokens": 7})
    stopped = run(stage)
    assert stage.shell is not None
    assert stage.shell.commands == ["ls"]
    assert stopped.messages[:3] == (user("do it"), assistant("rm -rf "), user(CUT_OFF))
    assert stopped.stop_reason == "finished"


def test_a_command_that_the_shell_cannot_take_is_explained() -> None:
    stage = Stage(["echo a\0b", "submit"])
    stopped = run(stage)
    assert stopped.messages[2] == user("The command holds a NUL character, which no shell accepts.")
    assert (stopped.stop_reason, stopped.tool_calls) == ("finished", 1)


def test_identical_commands_end_the_episode_before_the_last_is_run() -> None:
    stage = Stage(["ls", "ls", "ls"], settings={"max_repeats": 3})
    stopped = run(stage)
    assert (stopped.stop_reason, stopped.turns, stopped.tool_calls) == ("repetition", 3, 2)
    assert stage.shell is not None
    assert stage.shell.commands == ["ls", "ls"]


def test_only_commands_in_a_row_are_repetition() -> None:
    stage = Stage(["ls", "ls", "pwd", "ls", "ls", "submit"], settings={"max_repeats": 3})
    assert run(stage).stop_reason == "finished"


def test_max_turns() -> None:
    stopped = run(Stage(["a", "b", "c"], budget={"max_turns": 2}))
    assert (stopped.stop_reason, stopped.turns, stopped.tool_calls) == ("max_turns", 2, 2)
    assert stopped.messages[-1]["role"] == "user"


def test_max_tokens_between_turns() -> None:
    stage = Stage(["ab", "cd"], budget={"max_tokens": 6})
    stopped = run(stage)
    assert (stopped.stop_reason, stopped.sampled_tokens, stopped.turns) == ("max_tokens", 6, 2)
    assert stage.model.allowances == [6, 3]


def test_max_tokens_within_a_line() -> None:
    stage = Stage(["ab", "rm -rf /"], budget={"max_tokens": 8})
    stopped = run(stage)
    assert (stopped.stop_reason, stopped.sampled_tokens) == ("max_tokens", 8)
    assert stage.shell is not None
    assert stage.shell.commands == ["ab"]
    assert stopped.messages[-1] == assistant("rm -r")


def test_context_full_before_a_prompt() -> None:
    stage = Stage(
        ["cat", "never"], shell=shell(cat=result("x" * 500)), budget={"context_tokens": 500}
    )
    stopped = run(stage)
    assert (stopped.stop_reason, stopped.turns, len(stage.model.prompts)) == ("context_full", 1, 1)
    assert stage.trace.turns == 1


def test_context_full_within_a_line() -> None:
    prompt = 1 + len("do it") + 1 + 1
    stage = Stage(["rm -rf /"], budget={"context_tokens": prompt + 4})
    stopped = run(stage)
    assert (stopped.stop_reason, stage.model.allowances) == ("context_full", [4])
    assert stage.shell is not None
    assert stage.shell.commands == []


def test_context_full_said_by_the_server() -> None:
    stopped = run(Stage(["ls", ContextFull("too long")]))
    assert (stopped.stop_reason, stopped.turns) == ("context_full", 1)


def test_agent_timeout_before_a_turn() -> None:
    stage = Stage(["ls", "never"])
    assert stage.shell is not None
    stage.shell.after_run = lambda: setattr(stage, "now", 100.0)
    stopped = run(stage)
    assert (stopped.stop_reason, stopped.turns, stopped.tool_calls) == ("agent_timeout", 1, 1)
    assert stopped.tool_seconds == 100.0


def test_agent_timeout_while_the_model_thinks() -> None:
    stage = Stage(["ls"])
    stage.model.on_generate = lambda: setattr(stage, "now", 101.0)
    stopped = run(stage)
    assert (stopped.stop_reason, stopped.turns, stopped.inference_seconds) == (
        "agent_timeout",
        1,
        101.0,
    )
    assert stage.shell is not None
    assert stage.shell.commands == []


def test_a_submission_counts_even_when_time_ran_out() -> None:
    stage = Stage(["submit 1"])
    stage.model.on_generate = lambda: setattr(stage, "now", 101.0)
    assert (run(stage).stop_reason, run(Stage(["submit 1"])).answer) == ("finished", "1")


def test_a_command_gets_no_more_time_than_the_agent_has_left() -> None:
    stage = Stage(["ls", "submit"], now=90.0)
    run(stage)
    assert stage.shell is not None
    assert stage.shell.limits[0][0] == 10.0


@pytest.mark.parametrize("moment", ["before", "generating", "running"])
def test_cancelling_ends_the_episode_at_once(moment: str) -> None:
    stage = Stage(["ls", "never"])
    assert stage.shell is not None

    def cancel() -> None:
        stage.is_cancelled = True

    if moment == "before":
        cancel()
    elif moment == "generating":
        stage.model.on_generate = cancel
    else:
        stage.shell.after_run = cancel
    with pytest.raises(AgentCancelled) as caught:
        run(stage)
    assert caught.value.code == "agent.cancelled"
    assert [event for event in stage.journal.events if event[0] == "observed"] == []
    assert (len(stage.model.prompts), len(stage.shell.commands)) == {
        "before": (0, 0),
        "generating": (1, 0),
        "running": (1, 1),
    }[moment]


@pytest.mark.parametrize("fault", [NoServer("none"), SandboxGone("gone")])
def test_faults_that_are_not_the_policys_pass_through(fault: Exception) -> None:
    in_shell = isinstance(fault, SandboxGone)
    stage = Stage(["ls"] if in_shell else [fault], shell=shell(ls=fault) if in_shell else shell())
    with pytest.raises(type(fault)) as caught:
        run(stage)
    assert caught.value is fault


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"max_malformed": 0}, "max_malformed"),
        ({"max_malformed": True}, "max_malformed"),
        ({"max_repeats": 1}, "max_repeats"),
        ({"interrupted_command": "ignore"}, "interrupted_command"),
        ({"demonstration": []}, "demonstration"),
        ({"demonstrations": "ls"}, "demonstrations"),
        ({"demonstrations": [[]]}, "conversation 0"),
        ({"demonstrations": [[user("a")]]}, "conversation 0"),
        ({"demonstrations": [[assistant("a"), user("b")]]}, "conversation 0, message 0"),
        ({"demonstrations": [[user("a"), {"role": "assistant"}]]}, "message 1"),
        ({"demonstrations": [[user("a"), {"role": "assistant", "content": 1}]]}, "message 1"),
        ({"instruction_template": "no place"}, "instruction_template"),
        ({"instruction_template": "{instruction}{instruction}"}, "instruction_template"),
    ],
)
def test_wrong_settings_are_named_before_anything_is_sampled(
    settings: dict[str, Any], word: str
) -> None:
    stage = Stage(["submit"], settings=settings)
    with pytest.raises(InvalidAgentSettings, match=word):
        run(stage)
    assert stage.model.prompts == []


def test_the_scripted_model_is_cut_as_a_server_cuts() -> None:
    assert (said("ab").finish_reason, said("ab", 2).finish_reason) == ("stop", "length")
    assert said("ab", 3).finish_reason == "stop"
