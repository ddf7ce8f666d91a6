"""Batches: leased groups, to be acknowledged or given back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, Any

from prorl_client.calls import Answer, segment
from prorl_client.errors import ProrlError, UnreadableContent
from prorl_client.exports import open_export
from prorl_client.lease import KeepAlive, Lease, logger
from prorl_client.records import BatchRecord
from prorl_client.trajectories import Trajectory

if TYPE_CHECKING:
    from prorl_client._async.client import AsyncClient

FALLBACK_LEASE_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True, eq=False)
class AsyncBatch(BatchRecord):
    """A batch in hand.

    As a context manager it is acknowledged at the end, and given back after an exception; closing
    it before, inside, is fine. Its lease is kept until then.
    """

    trajectories: tuple[Trajectory, ...] = ()
    client: AsyncClient = field(repr=False)
    lease: Lease = field(repr=False)

    @property
    def groups(self) -> tuple[tuple[Trajectory, ...], ...]:
        """The trajectories by group, in the batch's order."""
        found: dict[str, list[Trajectory]] = {}
        for trajectory in self.trajectories:
            found.setdefault(trajectory.group, []).append(trajectory)
        return tuple(map(tuple, found.values()))

    @property
    def is_lost(self) -> bool:
        """Whether the lease is known, or by the clock must be feared, to have ended."""
        return self.lease.is_lost

    def __len__(self) -> int:
        return len(self.trajectories)

    def __iter__(self) -> Iterator[Trajectory]:
        return iter(self.trajectories)

    async def ack(self) -> None:
        """Say that it was consumed; twice is the same as once. Raises LeaseExpired."""
        await self._close("ack")

    async def nack(self) -> None:
        """Give it back: the next lease gets the same groups. Raises LeaseExpired."""
        await self._close("nack")

    async def extend(self, seconds: float) -> BatchRecord:
        """Lengthen the lease to so many seconds from now. Raises LeaseExpired."""
        began = monotonic()
        body = {"seconds": seconds}
        data = await self.client.post(f"/batches/{segment(self.id)}/extend/", body)
        self.lease.holds_until = began + seconds
        return BatchRecord.parse(data)

    async def export(self, path: str | Path, *, format: str | None = None) -> int:
        """Write its trajectories to a file; return how many. See `Experiment.export`."""
        with open_export(path, format=format) as export:
            for each in self.trajectories:
                whole = each
                if export.needs_messages and each.messages is None:
                    path_of = f"/rollouts/{segment(each.rollout)}/trajectory/"
                    whole = Trajectory.parse(await self.client.get(path_of))
                export.write(whole)
            return export.count

    async def __aenter__(self) -> AsyncBatch:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        fault: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        if self.lease.closed:
            return
        if fault is None:
            await self.ack()
            return
        try:
            await self.nack()
        except ProrlError as second:  # what happened first is what must be seen
            logger.warning("batch %s was not given back: %s", self.id, second)

    async def _close(self, how: str) -> None:
        self.lease.close()
        await self.client.post(f"/batches/{segment(self.id)}/{how}/")


async def read_batch(
    client: AsyncClient, answer: Answer, *, keep_alive: KeepAlive | None
) -> AsyncBatch:
    """Return the batch of an answer and begin to keep its lease."""
    description, trajectories = answer.content
    seconds = lease_seconds(answer)
    if description is None:
        description = await _describe(client, answer)
    lease = Lease(description["id"], seconds, keep_alive)
    batch = AsyncBatch.parse(
        description, trajectories=tuple(trajectories), client=client, lease=lease
    )
    client.lease_keeper.watch(lease)
    return batch


def lease_seconds(answer: Answer) -> float:
    """Return how long the lease still holds, by the service's clock alone."""
    try:
        ends = parsedate_to_datetime(answer.headers["batch-lease-expires"])
        now = parsedate_to_datetime(answer.headers["date"])
    except (KeyError, TypeError, ValueError):
        return FALLBACK_LEASE_SECONDS
    return max(1.0, (ends - now).total_seconds())


async def _describe(client: AsyncClient, answer: Answer) -> dict[str, Any]:
    """Return the description of a batch that came as lines, which hold trajectories only."""
    wanted = answer.headers.get("batch-id", "")
    async for row in client.pages("/batches/"):
        if row["id"] == wanted:
            return dict(row)
    raise UnreadableContent(f"The service does not list the batch {wanted!r} that it gave.")
