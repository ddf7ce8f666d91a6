"""The client: what there is, and how to make more of it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from prorl_client import arrow
from prorl_client._async.batches import AsyncBatch, read_batch
from prorl_client._async.evaluations import AsyncEvaluation
from prorl_client._async.experiments import AsyncExperiment
from prorl_client._async.policies import AsyncPolicy
from prorl_client._async.rollouts import AsyncGroup, AsyncRollout, wait_for_groups
from prorl_client._async.task_imports import AsyncTaskImport
from prorl_client._async.transport import AsyncTransport
from prorl_client._sync.transport import Transport
from prorl_client.calls import Answer, Call, batch_call, call, new_key, segment
from prorl_client.config import find_address
from prorl_client.errors import MissingExtra, NotFound
from prorl_client.lease import KeepAlive, LeaseKeeper
from prorl_client.records import (
    BatchRecord,
    Record,
    ServerRecord,
    TaskRecord,
    TaskSetRecord,
)
from prorl_client.retries import RetryPolicy
from prorl_client.uploads import sendable

_R = TypeVar("_R", bound=Record)

PAGE_SIZE = 200
KEEP_RETRY_SECONDS = 5.0


class AsyncClient:
    """A trainer's way to the service.

    `url` and `token` default to PRORL_URL and PRORL_TOKEN, then to the configuration file.
    `timeout` is how many seconds may pass without a byte. `use_arrow` None: where pyarrow is
    installed. `http_options` goes to httpx: `verify`, `proxy`, `limits`. Use it as a context
    manager, or close it. Threads may share it.
    """

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        *,
        profile: str | None = None,
        retries: RetryPolicy | None = None,
        timeout: float = 60.0,
        use_arrow: bool | None = None,
        http_options: Mapping[str, Any] | None = None,
    ) -> None:
        if use_arrow and not arrow.is_available():
            raise MissingExtra("Install pyarrow: pip install 'prorl-client[arrow]'.")
        self.use_arrow = arrow.is_available() if use_arrow is None else use_arrow
        self._transport = AsyncTransport(
            find_address(url, token, profile=profile),
            retries=retries or RetryPolicy(),
            timeout=timeout,
            http_options=http_options or {},
        )
        self._keeping: Transport | None = None
        self.lease_keeper = LeaseKeeper(self._extend)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        fault: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Stop keeping leases and close the connections."""
        self.lease_keeper.close()
        if self._keeping is not None:
            self._keeping.close()
        await self._transport.close()

    @property
    def retries(self) -> RetryPolicy:
        """How long calls insist."""
        return self._transport.retries

    async def send(self, call: Call) -> Answer:
        """Send a call of your own, with the retries of every other."""
        return await self._transport.send(call)

    async def stream(self, call: Call) -> Any:
        """Open an answer that is read piece by piece; one try."""
        return await self._transport.open(call)

    async def get(self, path: str, **params: Any) -> Any:
        """Return the JSON of an address below the API's prefix."""
        return (await self.send(call("GET", path, params=params))).content

    async def post(self, path: str, body: Any = None, *, key: str | None = None) -> Any:
        """Post JSON and return the answer's; the key makes it safe to send again."""
        return (await self.send(call("POST", path, body, key=key))).content

    async def pages(self, path: str, **params: Any) -> AsyncIterator[Mapping[str, Any]]:
        """Yield every row of a list, page by page."""
        page = await self.get(path, page_size=PAGE_SIZE, **params)
        while True:
            for row in page["results"]:
                yield row
            if not page.get("next"):
                return
            # The service builds addresses as it is reached; we may reach it by another.
            _, _, query = page["next"].partition("?")
            page = await self.get(f"{path}?{query}")

    # Experiments

    async def create_experiment(
        self, name: str, policy: str, *, idempotency_key: str | None = None, **settings: Any
    ) -> AsyncExperiment:
        """Create an experiment on a policy (name or id); settings are the API's, by its names."""
        body = {"name": name, "policy": policy, **settings}
        data = await self.post("/experiments/", body, key=idempotency_key or new_key())
        return AsyncExperiment.parse(data, client=self)

    async def experiment(self, experiment_id: str) -> AsyncExperiment:
        """Return an experiment by its id. Raises NotFound."""
        data = await self.get(f"/experiments/{segment(experiment_id)}/")
        return AsyncExperiment.parse(data, client=self)

    async def experiments(self, **filters: Any) -> AsyncIterator[AsyncExperiment]:
        """Yield the experiments by `name`, `state` or `policy`, the newest first."""
        async for row in self.pages("/experiments/", **filters):
            yield AsyncExperiment.parse(row, client=self)

    # Groups, rollouts, batches

    async def group(self, group_id: str) -> AsyncGroup:
        """Return a group. Raises NotFound."""
        return AsyncGroup.parse(await self.get(f"/groups/{segment(group_id)}/"), client=self)

    async def groups(self, **filters: Any) -> AsyncIterator[AsyncGroup]:
        """Yield groups by `experiment`, `state`, `task`, `task_ref`, `batch`."""
        async for row in self.pages("/groups/", **filters):
            yield AsyncGroup.parse(row, client=self)

    async def wait(
        self, groups: Iterable[AsyncGroup], *, timeout: float | None = None, progress: bool = False
    ) -> list[AsyncGroup]:
        """Return the groups once none is open, in their order. Raises WaitTimedOut."""
        return await wait_for_groups(groups, timeout=timeout, progress=progress)

    async def rollout(self, rollout_id: str) -> AsyncRollout:
        """Return a rollout. Raises NotFound."""
        data = await self.get(f"/rollouts/{segment(rollout_id)}/")
        return AsyncRollout.parse(data, client=self)

    async def rollouts(self, **filters: Any) -> AsyncIterator[AsyncRollout]:
        """Yield rollouts by `experiment`, `group`, `batch`, `state`, `outcome` and more."""
        async for row in self.pages("/rollouts/", **filters):
            yield AsyncRollout.parse(row, client=self)

    async def batch(self, batch_id: str, *, keep_alive: KeepAlive | None = None) -> AsyncBatch:
        """Return a leased batch with its trajectories again. Raises LeaseExpired, NotFound."""
        path = f"/batches/{segment(batch_id)}/"
        answer = await self.send(batch_call("GET", path, use_arrow=self.use_arrow))
        return await read_batch(self, answer, keep_alive=keep_alive)

    async def batches(self, **filters: Any) -> AsyncIterator[BatchRecord]:
        """Yield batches by `experiment` and `state`, without trajectories, the newest first."""
        async for row in self.pages("/batches/", **filters):
            yield BatchRecord.parse(row)

    # Policies and servers

    async def policy(self, name_or_id: str) -> AsyncPolicy:
        """Return a policy. Raises NotFound."""
        try:
            data = await self.get(f"/policies/{segment(name_or_id)}/")
            return AsyncPolicy.parse(data, client=self)
        except NotFound as fault:
            async for policy in self.policies():
                if policy.name == name_or_id:
                    return policy
            raise fault

    async def policies(self) -> AsyncIterator[AsyncPolicy]:
        """Yield the policies."""
        async for row in self.pages("/policies/"):
            yield AsyncPolicy.parse(row, client=self)

    async def create_policy(
        self,
        name: str,
        model: str,
        *,
        tokenizer: str = "",
        idempotency_key: str | None = None,
        **settings: Any,
    ) -> AsyncPolicy:
        """Create a policy; without a tokenizer it is text only."""
        body = {"name": name, "model": model, "tokenizer": tokenizer, **settings}
        data = await self.post("/policies/", body, key=idempotency_key or new_key())
        return AsyncPolicy.parse(data, client=self)

    async def servers(self, **filters: Any) -> AsyncIterator[ServerRecord]:
        """Yield the registered inference servers by `policy`, `state`, `healthy`."""
        async for row in self.pages("/inference-servers/", **filters):
            yield ServerRecord.parse(row)

    async def add_server(self, policy: str, url: str, **settings: Any) -> ServerRecord:
        """Register an inference server of a policy: `kind`, `max_in_flight`."""
        body = {"policy": policy, "url": url, **settings}
        return ServerRecord.parse(await self.post("/inference-servers/", body, key=new_key()))

    async def remove_server(self, server_id: str) -> None:
        """Send a server no new work. Raises NotFound."""
        await self.send(call("DELETE", f"/inference-servers/{segment(server_id)}/"))

    async def clear_servers(self, policy: str | None = None) -> int:
        """Remove all servers of a policy, or of every policy of the caller's; return how many."""
        body = {} if policy is None else {"policy": policy}
        return int((await self.post("/inference-servers/clear/", body))["removed"])

    # Evaluations

    async def evaluate(
        self,
        name: str,
        policy: str,
        task_sets: Iterable[str],
        *,
        samples_per_task: int = 1,
        idempotency_key: str | None = None,
        **settings: Any,
    ) -> AsyncEvaluation:
        """Begin to evaluate a policy's present version; settings: `seed`, `key`, `threshold` …"""
        body = {
            "name": name,
            "policy": policy,
            "task_sets": list(task_sets),
            "samples_per_task": samples_per_task,
            **settings,
        }
        data = await self.post("/evaluations/", body, key=idempotency_key or new_key())
        return AsyncEvaluation.parse(data, client=self)

    async def evaluation(self, evaluation_id: str) -> AsyncEvaluation:
        """Return an evaluation run with what it has found by now. Raises NotFound."""
        data = await self.get(f"/evaluations/{segment(evaluation_id)}/")
        return AsyncEvaluation.parse(data, client=self)

    # Tasks

    async def task_sets(self) -> AsyncIterator[TaskSetRecord]:
        """Yield the task sets."""
        async for row in self.pages("/task-sets/"):
            yield TaskSetRecord.parse(row)

    async def tasks(self, task_set_id: str, **filters: Any) -> AsyncIterator[TaskRecord]:
        """Yield the tasks of a set by `ref` and `environment`."""
        async for row in self.pages(f"/task-sets/{segment(task_set_id)}/tasks/", **filters):
            yield TaskRecord.parse(row)

    async def import_tasks(
        self, path: str | Path, set_name: str, *, options: Any = None, **settings: str | None
    ) -> AsyncTaskImport:
        """Send a file or folder of tasks to be imported into a task set, as an operator may.

        Settings: `format`, `environment`, `description`; `options` say how rows are read.
        """
        given = {name: each for name, each in settings.items() if each}
        if options:
            given["options"] = json.dumps(options)
        with sendable(Path(path)) as file:
            params = {**given, "set_name": set_name, "name": Path(path).name}
            headers = {"Content-Type": "application/octet-stream"}
            sent = Call("POST", "/task-sets/imports/", file=file, params=params, headers=headers)
            data = (await self.send(sent)).content
        return AsyncTaskImport.parse(data, client=self)

    async def task_import(self, import_id: str) -> AsyncTaskImport:
        """Return an import as it stands. Raises NotFound."""
        data = await self.get(f"/task-sets/imports/{segment(import_id)}/")
        return AsyncTaskImport.parse(data, client=self)

    def _extend(self, batch_id: str, seconds: float) -> None:
        """Lengthen a lease, from the keeper's thread and over connections of its own."""
        if self._keeping is None:
            options = self._transport.clone_options()
            retries = replace(self._transport.retries, total_seconds=KEEP_RETRY_SECONDS)
            self._keeping = Transport(**options, retries=retries)
        path = f"/batches/{segment(batch_id)}/extend/"
        self._keeping.send(call("POST", path, {"seconds": seconds}))
