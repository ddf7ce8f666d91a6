"""The journal that a stage hands to its agent: each step is a row before the next begins."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from rollouts.handlers.base import Action, JournaledTurn, Message
from rollouts.inference.protocol import Generation
from rollouts.services.claim import Claim
from rollouts.services.journal import Step, append_step, read_steps, run_seconds
from rollouts.stages.database import database
from sandboxes.runtime.sessions import ShellState
from sandboxes.setup_files import mask

MAX_SHELL_BYTES = 64 * 1024  # of one turn's shell state, as JSON
_GENERATED = tuple(field.name for field in fields(Generation))
_CALLED = "call "  # and its number: the kind of a step between sampled and observed
_DROPPED = ("functions", "aliases", "options", "exports")  # in this order


class StageJournal:
    """Write turns under the claim's lease, and read those of an earlier worker."""

    def __init__(self, claim: Claim) -> None:
        self._claim = claim
        # As written last, by whichever worker.
        self.shell_state: ShellState | None = None
        # Called with the number of turns done, once one is written whose snapshot is asked for.
        self.after_turn: Callable[[int, ShellState | None], None] | None = None
        # What no row may hold: variables of the episode's programs, given anew to each worker.
        self.secrets: Mapping[str, str] = {}
        self._so_far: list[int] = []
        self._turns = self._read()
        # Time before the lost worker's end counts too: three workers do not make three budgets.
        self.seconds_spent = run_seconds(claim=claim) if self._turns else 0.0

    def record_sampled(
        self,
        turn: int,
        generation: Generation,
        prompt_ids: Sequence[int],
        action: Action,
        *,
        fork_reason: str | None = None,
    ) -> None:
        """Write a sampled turn. Raises LeaseLost."""
        body = {
            # asdict would copy every token on its own.
            **{name: getattr(generation, name) for name in _GENERATED},
            **self._prompt_delta(prompt_ids),
            "action": action.as_dict(),
            "fork_reason": fork_reason,
        }
        self._append(Step(turn, "sampled", body))
        self._so_far = [*prompt_ids, *generation.token_ids]

    def record_called(
        self, turn: int, call: int, message: Message, shell_state: ShellState | None
    ) -> None:
        """Write the result of one of several calls, and the shell's state. Raises LeaseLost."""
        shell = self._shell_delta(shell_state)
        self._append(Step(turn, f"{_CALLED}{call}", {"messages": [dict(message)], "shell": shell}))

    def record_observed(
        self, turn: int, messages: Sequence[Message], shell_state: ShellState | None
    ) -> None:
        """Write what the turn led to, and the shell's state where it changed. Raises LeaseLost."""
        shell = self._shell_delta(shell_state)
        body = {"messages": [dict(message) for message in messages], "shell": shell}
        snapshot_is_due = self._append(Step(turn, "observed", body))
        if snapshot_is_due and self.after_turn is not None:
            self.after_turn(turn + 1, shell_state)

    def turns_done(self) -> int:
        """Return how many turns of an earlier worker were carried out to their end."""
        return sum(turn.messages is not None for turn in self._turns)

    def replay(self) -> Sequence[JournaledTurn]:
        """Return the turns of an earlier worker, in order."""
        return self._turns

    def _append(self, step: Step) -> bool:
        with database():
            return append_step(claim=self._claim, step=step)

    def _shell_delta(self, shell_state: ShellState | None) -> dict[str, Any] | None:
        """Take a state as the present one; return it where it differs from the one before."""
        kept = self.shell_state
        if shell_state is not None:
            kept = bounded(without_secrets(shell_state, self.secrets))
        is_new = kept is not None and kept != self.shell_state
        self.shell_state = kept
        return kept.as_dict() if kept is not None and is_new else None

    def _prompt_delta(self, prompt_ids: Sequence[int]) -> dict[str, Any]:
        """Return only what a prompt adds to all tokens before it, or all of it after a fork.

        Whole prompts would make the journal grow with the square of an episode's length.
        """
        kept = len(self._so_far)
        if list(prompt_ids[:kept]) != self._so_far:
            kept = 0
        return {"prompt_keeps": kept, "prompt_adds": list(prompt_ids[kept:])}

    def _read(self) -> list[JournaledTurn]:
        steps = read_steps(claim=self._claim)
        observed = {step.turn: step.body for step in steps if step.kind == "observed"}
        called: dict[int, list[Message]] = {}
        for step in steps:
            if step.kind.startswith(_CALLED):
                called.setdefault(step.turn, []).extend(step.body["messages"])
            if step.body.get("shell") is not None:
                self.shell_state = ShellState.from_dict(step.body["shell"])
        turns = []
        for step in steps:
            if step.kind != "sampled":
                continue
            body = step.body
            prompt_ids = [*self._so_far[: body["prompt_keeps"]], *body["prompt_adds"]]
            generation = _generation(body)
            self._so_far = [*prompt_ids, *generation.token_ids]
            seen = observed.get(step.turn)
            turns.append(
                JournaledTurn(
                    turn=step.turn,
                    prompt_ids=tuple(prompt_ids),
                    generation=generation,
                    action=Action.from_dict(body["action"]),
                    messages=None if seen is None else tuple(seen["messages"]),
                    called=tuple(called.get(step.turn, ())),
                    fork_reason=body.get("fork_reason"),
                )
            )
        return turns


def bounded(state: ShellState) -> ShellState:
    """Return a state without the parts that make it too large to be written; cwd always stays."""
    for part in _DROPPED:
        if len(json.dumps(state.as_dict())) <= MAX_SHELL_BYTES:
            break
        state = replace(state, **{part: ""})
    return state


def without_secrets(state: ShellState, secrets: Mapping[str, str]) -> ShellState:
    """Return a state that neither exports these variables nor holds their values."""
    if not secrets:
        return state
    names = "|".join(map(re.escape, secrets))
    own = re.compile(rf"(?:declare -\w+|export) (?:{names})(?:=|$)")
    exports = "\n".join(line for line in state.exports.split("\n") if not own.match(line))
    kept = {**state.as_dict(), "exports": exports}
    return ShellState.from_dict({part: mask(text, secrets) for part, text in kept.items()})


def _generation(body: dict[str, Any]) -> Generation:
    return Generation(
        token_ids=tuple(body["token_ids"]),
        logprobs=tuple(body["logprobs"]),
        finish_reason=body["finish_reason"],
        policy_version=body["policy_version"],
        server_id=body["server_id"],
        seconds=body["seconds"],
        logprob_mode=body["logprob_mode"],
        version_runs=tuple((version, run) for version, run in body.get("version_runs", ())),
        cached_tokens=body.get("cached_tokens"),
    )
