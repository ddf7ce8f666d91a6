"""Experiments: submit, lease batches, watch, export."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from prorl_client._async.batches import AsyncBatch, read_batch
from prorl_client._async.events import follow
from prorl_client._async.rollouts import AsyncGroup, AsyncRollout
from prorl_client.calls import POLL_SECONDS, batch_call, call, new_key, segment
from prorl_client.errors import LeaseExpired, NotFound, NothingLeft, WaitTimedOut
from prorl_client.exports import open_export
from prorl_client.lease import KeepAlive
from prorl_client.progress import Progress
from prorl_client.records import BatchRecord, ExperimentRecord
from prorl_client.sse import Event
from prorl_client.submissions import Task, as_entry, packed

if TYPE_CHECKING:
    from prorl_client._async.client import AsyncClient

KEEP_ALIVE = KeepAlive()


@dataclass(frozen=True, kw_only=True)
class AsyncExperiment(ExperimentRecord):
    """An experiment as it stood when it was asked for."""

    client: AsyncClient = field(repr=False, compare=False)

    @property
    def path(self) -> str:
        """Where it is."""
        return f"/experiments/{segment(self.id)}/"

    async def refresh(self) -> AsyncExperiment:
        """Return it as it stands now."""
        return await self.client.experiment(self.id)

    async def change(self, **settings: Any) -> AsyncExperiment:
        """Change settings; it holds for rollouts not yet started."""
        answer = await self.client.send(call("PATCH", self.path, settings))
        return AsyncExperiment.parse(answer.content, client=self.client)

    async def pause(self) -> AsyncExperiment:
        """Start nothing more; what runs goes on."""
        return self._parse(await self.client.post(f"{self.path}pause/"))

    async def resume(self) -> AsyncExperiment:
        """Start rollouts again."""
        return self._parse(await self.client.post(f"{self.path}resume/"))

    async def stop(self) -> int:
        """Cancel all that is unfinished, for good; return how many rollouts that were."""
        return int((await self.client.post(f"{self.path}stop/"))["cancelled"])

    async def rewind(self, version: int, *, force: bool = False) -> Mapping[str, Any]:
        """Go back to an older version after a restart from its checkpoint; return what that did."""
        body = {"version": version, "force": force}
        answer: Mapping[str, Any] = await self.client.post(f"{self.path}rewind/", body)
        return answer

    async def metrics(self) -> Mapping[str, Any]:
        """Return counts, rewards, times, throughput and lag."""
        answer: Mapping[str, Any] = await self.client.get(f"{self.path}metrics/")
        return answer

    async def submit(
        self,
        tasks: Iterable[Task],
        *,
        samples: int | None = None,
        priority: int | None = None,
        metadata: Mapping[str, Any] | None = None,
        idempotency_key: str | None = None,
        progress: bool = False,
    ) -> list[AsyncGroup]:
        """Have each task sampled; return the groups in the tasks' order.

        A task is its reference, its id as a UUID, a record of it, an InlineTask, or an entry of
        the API's form. Many tasks go in several calls, each all or nothing: when one is refused,
        those before it stand. The same key and tasks submit nothing twice.
        """
        key = idempotency_key or new_key()
        defaults = {"samples": samples, "priority": priority, "metadata": metadata}
        entries = [as_entry(task, defaults) for task in tasks]
        groups: list[AsyncGroup] = []
        with Progress("submitted", len(entries), shown=progress) as bar:
            for number, pack in enumerate(packed(entries)):
                data = await self.client.post(
                    f"{self.path}groups/", {"groups": pack}, key=f"{key}-{number}"
                )
                for row in data["groups"]:
                    groups.append(AsyncGroup.parse(row, client=self.client, experiment=self.id))
                bar.set(len(groups))
        return groups

    async def lease(
        self,
        groups: int,
        *,
        timeout: float | None = None,
        keep_alive: KeepAlive | None = KEEP_ALIVE,
        **conditions: Any,
    ) -> AsyncBatch:
        """Return the next batch of so many groups, once they are finished.

        Waits for ever, or raises WaitTimedOut after `timeout` seconds; NothingLeft when the
        experiment is stopped, or its feed used up. `conditions` are the API's: `max_policy_lag`,
        `min_complete_fraction`. Whatever is lost on the way, one call leases one batch.
        """
        batch = await self._next(groups, timeout, keep_alive, conditions)
        if batch is None:
            raise NothingLeft(f"Experiment {self.name} has no {groups} groups left to come.")
        return batch

    async def batches(
        self,
        groups: int,
        *,
        limit: int | None = None,
        timeout: float | None = None,
        keep_alive: KeepAlive | None = KEEP_ALIVE,
        progress: bool = False,
        **conditions: Any,
    ) -> AsyncIterator[AsyncBatch]:
        """Yield batch after batch, each to be acknowledged or given back by the caller.

        Ends after `limit` batches, when the experiment is stopped, or when its feed is exhausted
        and too few groups are left. Raises WaitTimedOut when none comes for `timeout` seconds.
        """
        count = 0
        with Progress("batches", limit, shown=progress) as bar:
            while limit is None or count < limit:
                batch = await self._next(groups, timeout, keep_alive, conditions)
                if batch is None:
                    return
                count += 1
                yield batch
                del batch  # what the caller forgets must not be kept alive here
                bar.set(count)

    async def leases(self, **filters: Any) -> AsyncIterator[BatchRecord]:
        """Yield its batches of every `state`, without trajectories, the newest first."""
        async for row in self.client.pages(f"{self.path}batches/", **filters):
            yield BatchRecord.parse(row)

    async def groups(self, **filters: Any) -> AsyncIterator[AsyncGroup]:
        """Yield its groups by `state`, `task`, `task_ref`, `batch`."""
        async for row in self.client.pages(f"{self.path}groups/", **filters):
            yield AsyncGroup.parse(row, client=self.client)

    async def rollouts(self, **filters: Any) -> AsyncIterator[AsyncRollout]:
        """Yield its rollouts by `state`, `outcome`, `group` and more."""
        async for rollout in self.client.rollouts(experiment=self.id, **filters):
            yield rollout

    async def events(self, last_id: str = "", *, kinds: Iterable[str] = ()) -> AsyncIterator[Event]:
        """Yield what happens, from now or after an event; goes on where a connection broke.

        An event of kind `resync` says that some were lost: read again what you follow.
        """
        async for event in follow(self.client, f"{self.path}events/", last_id, kinds):
            yield event

    async def export(
        self,
        path: str | Path,
        *,
        format: str | None = None,
        progress: bool = False,
        **filters: Any,
    ) -> int:
        """Write the trajectories of finished rollouts to a file; return how many.

        Formats: `jsonl`, `parquet` (needs pyarrow) and `atif` (a folder with a document each, or
        one a line in a file); by the path's ending when not given. The file appears when it is
        complete. `filters` are those of `rollouts`; only scored ones unless `outcome` says else:
        None is all that are done. What left no trajectory is passed over.
        """
        filters = {"state": "done", "outcome": "scored", **filters}
        with open_export(path, format=format) as export:
            with Progress("trajectories", None, shown=progress) as bar:
                async for rollout in self.rollouts(**filters):
                    try:
                        export.write(await rollout.trajectory())
                    except NotFound as fault:
                        if fault.code != "trajectory.none":
                            raise
                    bar.add()
            return export.count

    def _parse(self, data: Mapping[str, Any]) -> AsyncExperiment:
        return AsyncExperiment.parse(data, client=self.client)

    async def _next(
        self,
        groups: int,
        timeout: float | None,
        keep_alive: KeepAlive | None,
        conditions: Mapping[str, Any],
    ) -> AsyncBatch | None:
        """Return the next batch, or None when none can come any more. Raises WaitTimedOut."""
        end = None if timeout is None else monotonic() + timeout
        key, wait = new_key(), POLL_SECONDS
        while True:
            left = POLL_SECONDS if end is None else max(0.0, end - monotonic())
            if left < wait:  # another wait is another body, which needs another key
                key, wait = new_key(), left
            body = {"groups": groups, "wait_seconds": wait, **conditions}
            try:
                batch = await self._ask(body, key, keep_alive)
            except LeaseExpired:  # leased for us, but the answer could not be had in time
                key = new_key()
                continue
            if batch is not None:
                return batch
            if await self._is_used_up(groups):
                # What became ready between the answer and the look.
                return await self._ask({**body, "wait_seconds": 0.0}, new_key(), keep_alive)
            if end is not None and monotonic() >= end:
                raise WaitTimedOut(f"Fewer than {groups} groups were ready within {timeout} s.")

    async def _ask(
        self, body: Mapping[str, Any], key: str, keep_alive: KeepAlive | None
    ) -> AsyncBatch | None:
        """Ask for a batch once; None when there were too few groups until the end of the wait."""
        answer = await self.client.send(
            batch_call(
                "POST",
                f"{self.path}batches/",
                body,
                key=key,
                use_arrow=self.client.use_arrow,
                wait_seconds=body["wait_seconds"],
            )
        )
        if answer.status == 204:
            return None
        return await read_batch(self.client, answer, keep_alive=keep_alive)

    async def _is_used_up(self, groups: int) -> bool:
        now = await self.refresh()
        return now.state == "stopped" or (now.exhausted and sum(now.coming.values()) < groups)
