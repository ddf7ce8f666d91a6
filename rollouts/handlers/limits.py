"""The settings that every agent with several turns has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollouts.handlers.settings import read_choice, read_count
from rollouts.handlers.window import read_context_policy

LIMIT_SETTINGS = frozenset(
    {
        "max_malformed",
        "max_repeats",
        "repeated_words",
        "max_text_repeats",
        "interrupted_command",
        "context_policy",
    }
)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bound what a policy may do wrong, and say what then.

    `malformed`: malformed turns in a row that end the episode. `repeats`: identical actions in a
    row that end it, the last of which is not carried out. `text_repeats`: times that the same
    `repeated_words` words may stand in one turn, 0 for any. `on_interrupted`: what to do when a
    worker died while an action ran: `restart` raises `CommandInterrupted`, `report` tells the
    model. `context_policy`: see `window`.
    """

    malformed: int
    repeats: int
    repeated_words: int
    text_repeats: int
    on_interrupted: str
    context_policy: str


def read_limits(settings: Mapping[str, Any]) -> Limits:
    """Return the limits; raise `InvalidAgentSettings` for the first that is wrong."""
    return Limits(
        malformed=read_count(settings, "max_malformed", 3, least=1),
        repeats=read_count(settings, "max_repeats", 4, least=2),
        repeated_words=read_count(settings, "repeated_words", 8, least=1),
        text_repeats=read_count(settings, "max_text_repeats", 32, least=0),
        on_interrupted=read_choice(
            settings, "interrupted_command", "restart", ("restart", "report")
        ),
        context_policy=read_context_policy(settings),
    )
