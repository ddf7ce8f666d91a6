"""Groups and rollouts: look, wait, cancel, read what they left."""

from __future__ import annotations

from asyncio import sleep
from collections.abc import Iterable
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, Any

from prorl_client.calls import batch_call, segment
from prorl_client.errors import WaitTimedOut
from prorl_client.progress import Progress
from prorl_client.records import GroupRecord, RolloutRecord
from prorl_client.retries import Pauses
from prorl_client.trajectories import Trajectory

if TYPE_CHECKING:
    from prorl_client._async.client import AsyncClient

ASKED_AT_ONCE = 200


@dataclass(frozen=True, kw_only=True)
class AsyncRollout(RolloutRecord):
    """A rollout as it stood when it was asked for."""

    client: AsyncClient = field(repr=False, compare=False)

    @property
    def is_done(self) -> bool:
        """Whether it has ended, however it did."""
        return self.state == "done"

    async def refresh(self) -> AsyncRollout:
        """Return it as it stands now."""
        return await self.client.rollout(self.id)

    async def wait(self, timeout: float | None = None) -> AsyncRollout:
        """Return it once it is done. Raises WaitTimedOut."""
        end = None if timeout is None else monotonic() + timeout
        pauses, looks, found = Pauses(), 0, self
        while not found.is_done:
            pause = pauses.after(looks)
            if end is not None and monotonic() + pause > end:
                raise WaitTimedOut(f"Rollout {self.id} is still {found.state}.")
            await sleep(pause)
            looks += 1
            found = await self.refresh()
        return found

    async def cancel(self) -> AsyncRollout:
        """Cancel it. Raises Conflict when it is done."""
        data = await self.client.post(f"/rollouts/{segment(self.id)}/cancel/")
        return AsyncRollout.parse(data, client=self.client)

    async def trajectory(self) -> Trajectory:
        """Return what it left. Raises NotFound while there is nothing."""
        path = f"/rollouts/{segment(self.id)}/trajectory/"
        return Trajectory.parse(await self.client.get(path))

    async def attempts(self) -> list[Any]:
        """Return every try at every stage, oldest first, as the API tells."""
        return list(await self.client.get(f"/rollouts/{segment(self.id)}/attempts/"))


@dataclass(frozen=True, kw_only=True)
class AsyncGroup(GroupRecord):
    """A group as it stood when it was asked for, or as it was submitted."""

    client: AsyncClient = field(repr=False, compare=False)

    @property
    def is_open(self) -> bool:
        """Whether samples of it are still to be finished."""
        return self.state == "open"

    async def refresh(self) -> AsyncGroup:
        """Return it as it stands now."""
        return await self.client.group(self.id)

    async def wait(self, timeout: float | None = None) -> AsyncGroup:
        """Return it once it is not open any more. Raises WaitTimedOut."""
        return (await wait_for_groups([self], timeout=timeout))[0]

    async def cancel(self) -> AsyncGroup:
        """Cancel what is unfinished. Raises Conflict when it is not open."""
        data = await self.client.post(f"/groups/{segment(self.id)}/cancel/")
        return AsyncGroup.parse(data, client=self.client)

    async def trajectories(self) -> list[Trajectory]:
        """Return what its finished rollouts left, by sample, whatever became of the group."""
        path = f"/groups/{segment(self.id)}/trajectories/"
        answer = await self.client.send(batch_call("GET", path, use_arrow=False))
        return list(answer.content[1])


async def wait_for_groups(
    groups: Iterable[AsyncGroup],
    *,
    timeout: float | None = None,
    progress: bool = False,
) -> list[AsyncGroup]:
    """Return the groups once none is open, in their order. Raises WaitTimedOut."""
    found = {group.id: group for group in groups}
    end = None if timeout is None else monotonic() + timeout
    pauses, looks = Pauses(), 0
    with Progress("groups", len(found), shown=progress) as bar:
        while True:
            waiting = [each for each in found.values() if each.is_open]
            bar.set(len(found) - len(waiting))
            if not waiting:
                return list(found.values())
            pause = pauses.after(looks)
            if looks and end is not None and monotonic() + pause > end:
                raise WaitTimedOut(f"{len(waiting)} of {len(found)} groups are still open.")
            if looks:
                await sleep(pause)
            looks += 1
            # A window of them: with thousands, most look finished one after the other.
            for group in waiting[:ASKED_AT_ONCE]:
                found[group.id] = await group.refresh()
