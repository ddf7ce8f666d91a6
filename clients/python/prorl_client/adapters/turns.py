"""One sequence as the turns that it is made of, for trainers that take messages with ids."""

from __future__ import annotations

from dataclasses import dataclass

from prorl_client.adapters.rows import Row


@dataclass(frozen=True, kw_only=True)
class TurnIds:
    """One sampled turn: what the policy read since the turn before, and what it said."""

    read_ids: list[int]
    said_ids: list[int]
    logprobs: list[float]
    prompt_ids: list[int]


def turns_of(row: Row) -> list[TurnIds]:
    """Return the turns of a row; `read_ids` and `said_ids`, joined, are the whole row.

    `prompt_ids` is all that stands before a turn. Runs of sampled tokens are the turns, as the
    mask tells them: it is what every format carries.
    """
    found: list[TurnIds] = []
    place = 0
    read = list(row.prompt_ids)
    while place < len(row.mask):
        end = place
        while end < len(row.mask) and row.mask[end] == row.mask[place]:
            end += 1
        ids = row.response_ids[place:end]
        if row.mask[place]:
            found.append(
                TurnIds(
                    read_ids=read,
                    said_ids=ids,
                    logprobs=row.logprobs[place:end],
                    prompt_ids=row.prompt_ids + row.response_ids[:place],
                )
            )
            read = []
        else:
            read = [*read, *ids]
        place = end
    return found
