"""Drive an agent that answers with one line at a time: a shell command, or `submit`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollouts.handlers.base import (
    Action,
    AgentContext,
    AgentHandler,
    AgentResult,
    CommandInterrupted,
    InvalidAgentSettings,
    JournaledTurn,
    Message,
    StopReason,
)
from rollouts.handlers.episode import Episode
from rollouts.handlers.one_line import parse_one_line
from rollouts.handlers.prompt import PROMPT_SETTINGS, first_messages, validate_prompt
from rollouts.handlers.settings import read_choice, read_count, refuse_unknown
from rollouts.inference.protocol import Generation
from rollouts.tools.base import InvalidArguments, Tool, ToolContext

INTERRUPTED = (
    "(the output is lost)\n"
    "[interrupted: the machine that watched this command failed while it ran; it may have had "
    "its effect in full, in part or not at all. Look before you run it again]"
)


class CommandLineHandler(AgentHandler):
    """Let a small model work in a shell without any tool-call syntax.

    Settings: `demonstrations` and `instruction_template` (see `prompt`); `max_malformed`, the
    malformed answers in a row that end the episode (default 3); `max_repeats`, the identical
    commands in a row that end it, the last of which is not run (default 4);
    `interrupted_command`, what to do when a worker died while a command ran: `restart` raises
    `CommandInterrupted`, `report` tells the model and goes on.
    """

    name = "command_line"
    description = "One line a turn: a shell command, or submit with an optional answer."
    needs_sandbox = True

    def validate(self, settings: Mapping[str, Any]) -> None:
        """Check the names and values of all settings."""
        known = {*PROMPT_SETTINGS, "max_malformed", "max_repeats", "interrupted_command"}
        refuse_unknown(settings, known, handler=self.name)
        validate_prompt(settings)
        _Limits(settings)

    def run(self, context: AgentContext) -> AgentResult:
        """Run the episode to its end, going on after the last journaled turn if there is one."""
        self.validate(context.settings)
        for name in ("bash", "submit"):
            if name not in context.tools:
                raise InvalidAgentSettings(f"{self.name}: the environment lacks the tool {name!r}")
        return _Run(context).to_the_end()


class _Limits:
    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.malformed = read_count(settings, "max_malformed", 3, least=1)
        self.repeats = read_count(settings, "max_repeats", 4, least=2)
        self.on_interrupted = read_choice(
            settings, "interrupted_command", "restart", ("restart", "report")
        )


class _Run:
    """Hold one episode's place in the loop."""

    def __init__(self, context: AgentContext) -> None:
        self.context = context
        self.limits = _Limits(context.settings)
        self.episode = Episode(context, first_messages(context))
        self.malformed_in_a_row = 0
        self.last_command: str | None = None
        self.repeats = 0

    def to_the_end(self) -> AgentResult:
        for generation, journaled in self.episode.replay():
            ended = self.act(generation, journaled.action, journaled)
            if ended is not None:
                return ended
        while True:
            stop = self.episode.blocked()
            if stop is not None:
                return self.episode.result(stop)
            sampled = self.episode.sample()
            if isinstance(sampled, StopReason):
                return self.episode.result(sampled)
            complete = sampled.finish_reason != "length"
            action = parse_one_line(self.episode.text(sampled), complete=complete)
            self.episode.record(sampled, action)
            ended = self.act(sampled, action, None)
            if ended is not None:
                return ended

    def act(
        self, generation: Generation, action: Action, journaled: JournaledTurn | None
    ) -> AgentResult | None:
        """Do what the turn asks for; a journaled turn that was observed is only counted."""
        observed = journaled is not None and journaled.messages is not None
        if action.kind == "malformed":
            return self.complain(generation, str(action.text), observed)
        self.malformed_in_a_row = 0
        if action.kind == "submit":
            submitted = self.context.tools["submit"].call({"answer": action.text}, self.scope())
            return self.episode.result(StopReason.FINISHED, submitted.answer)
        command = str(action.text)
        self.repeats = self.repeats + 1 if command == self.last_command else 1
        self.last_command = command
        if self.repeats >= self.limits.repeats:
            return self.episode.result(StopReason.REPETITION)
        if observed:
            self.episode.tool_calls += 1
            return None
        if journaled is not None:
            self.report_interrupted()
            return None
        return self.execute(command)

    def complain(
        self, generation: Generation, complaint: str, observed: bool
    ) -> AgentResult | None:
        """Count a malformed answer and tell the model, unless it was the last it may give."""
        self.episode.malformed_actions += 1
        self.malformed_in_a_row += 1
        cut_by = self.episode.cut_by(generation)
        if cut_by is not None:
            return self.episode.result(cut_by)
        if self.malformed_in_a_row >= self.limits.malformed:
            return self.episode.result(StopReason.MALFORMED_ACTION)
        if not observed:
            self.episode.observe([_user(complaint)])
        return None

    def execute(self, command: str) -> AgentResult | None:
        """Run a command and show the model what came of it."""
        self.episode.check_cancelled()
        if self.episode.remaining_seconds() <= 0:
            return self.episode.result(StopReason.AGENT_TIMEOUT)
        bash: Tool = self.context.tools["bash"]
        began = self.context.clock()
        try:
            content = bash.call({"command": command}, self.scope()).content
        except InvalidArguments as error:
            content = str(error)
        finally:
            self.episode.tool_seconds += self.context.clock() - began
        self.episode.check_cancelled()
        self.episode.tool_calls += 1
        self.episode.observe([_user(content)])
        return None

    def report_interrupted(self) -> None:
        """Tell the model that its last command was cut short, if the settings accept that."""
        if self.limits.on_interrupted == "restart":
            raise CommandInterrupted("a command was in flight when the last worker died")
        self.episode.tool_calls += 1
        self.episode.observe([_user(INTERRUPTED)])

    def scope(self) -> ToolContext:
        return ToolContext(
            shell=self.context.shell,
            sandbox=self.context.sandbox,
            timeout_seconds=max(0.0, self.episode.remaining_seconds()),
            cancelled=self.context.cancelled,
        )


def _user(content: str) -> Message:
    return {"role": "user", "content": content}
