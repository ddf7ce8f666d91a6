"""Imports of tasks into task sets, which the service carries out as jobs."""

from __future__ import annotations

from asyncio import sleep
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING

from prorl_client.calls import segment
from prorl_client.errors import WaitTimedOut
from prorl_client.records import RejectedRowRecord, TaskImportRecord
from prorl_client.retries import Pauses

if TYPE_CHECKING:
    from prorl_client._async.client import AsyncClient

UNDER_WAY = ("queued", "running")


@dataclass(frozen=True, kw_only=True)
class AsyncTaskImport(TaskImportRecord):
    """An import as it stood when it was asked for."""

    client: AsyncClient = field(repr=False, compare=False)

    async def refresh(self) -> AsyncTaskImport:
        """Return it as it stands by now."""
        return await self.client.task_import(self.id)

    async def wait(
        self,
        timeout: float | None = None,
        *,
        seen: Callable[[TaskImportRecord], None] = lambda _now: None,
    ) -> AsyncTaskImport:
        """Return it once it is over, however it ended; `seen` is told of each look at it.

        Raises WaitTimedOut.
        """
        end = None if timeout is None else monotonic() + timeout
        pauses, looks, found = Pauses(longest_seconds=2.0), 0, await self.refresh()
        while found.state in UNDER_WAY:
            seen(found)
            pause = pauses.after(looks)
            if end is not None and monotonic() + pause > end:
                raise WaitTimedOut(f"The import of {self.name} is still {found.state}.")
            await sleep(pause)
            looks += 1
            found = await self.refresh()
        seen(found)
        return found

    async def rejected_rows(self) -> AsyncIterator[RejectedRowRecord]:
        """Yield what was refused, in the source's order; the first thousand are kept."""
        path = f"/task-sets/imports/{segment(self.id)}/rejected/"
        async for row in self.client.pages(path):
            yield RejectedRowRecord.parse(row)

    async def cancel(self) -> AsyncTaskImport:
        """Cancel it; what it imported stays."""
        data = await self.client.post(f"/task-sets/imports/{segment(self.id)}/cancel/")
        return AsyncTaskImport.parse(data, client=self.client)
