"""Evaluation runs: every task so many times, with fixed seeds, under one policy version."""

from __future__ import annotations

from asyncio import sleep
from collections.abc import Mapping
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, Any

from prorl_client.calls import segment
from prorl_client.errors import NothingLeft, WaitTimedOut
from prorl_client.records import EvaluationRecord
from prorl_client.retries import Pauses

if TYPE_CHECKING:
    from prorl_client._async.client import AsyncClient

UNDER_WAY = ("starting", "running")


@dataclass(frozen=True, kw_only=True)
class AsyncEvaluation(EvaluationRecord):
    """An evaluation run with what it had found when it was asked for."""

    client: AsyncClient = field(repr=False, compare=False)

    async def refresh(self) -> AsyncEvaluation:
        """Return it with what it has found by now."""
        return await self.client.evaluation(self.id)

    async def wait(self, timeout: float | None = None) -> AsyncEvaluation:
        """Return it once it is done. Raises WaitTimedOut, and NothingLeft when it was stopped."""
        end = None if timeout is None else monotonic() + timeout
        pauses, looks, found = Pauses(longest_seconds=10.0), 0, await self.refresh()
        while found.state in (*UNDER_WAY, "paused"):
            pause = pauses.after(looks)
            if end is not None and monotonic() + pause > end:
                raise WaitTimedOut(f"Evaluation {self.name} is still {found.state}.")
            await sleep(pause)
            looks += 1
            found = await self.refresh()
        if found.state != "done":
            raise NothingLeft(f"Evaluation {self.name} is {found.state}.")
        return found

    async def compare(self, other: AsyncEvaluation | str) -> Mapping[str, Any]:
        """Return how it differs from another run on the same tasks, paired by task."""
        which = other if isinstance(other, str) else other.id
        path = f"/evaluations/{segment(self.id)}/compare/"
        answer: Mapping[str, Any] = await self.client.get(path, **{"with": which})
        return answer
