"""The asynchronous client: the same calls, and a loop that is not blocked."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path

import prorl_client
import pytest
from prorl_client import AsyncClient, AsyncExperiment

from tests.clients import shapes
from tests.clients.conftest import PLAIN, QUICK
from tests.clients.scripted import BROKEN, Reply, Scripted, page, problem
from tests.clients.test_events import STREAM, stream
from tests.clients.test_policies import ABANDON, COMPLETE, POLICY, UPDATE, UPDATES, update
from tests.clients.test_submit import GROUPS, accept, group

ACK, NACK = f"/batches/{shapes.BATCH}/ack/", f"/batches/{shapes.BATCH}/nack/"


@asynccontextmanager
async def connected(service: Scripted) -> AsyncIterator[AsyncExperiment]:
    service.on("GET", "/experiments/e1/", Reply(body=shapes.experiment()))
    async with AsyncClient(service.url, "secret", retries=QUICK, http_options=PLAIN) as client:
        yield await client.experiment("e1")


def run(service: Scripted, body: Callable[[AsyncExperiment], Awaitable[None]]) -> None:
    async def main() -> None:
        async with connected(service) as experiment:
            await body(experiment)

    asyncio.run(main())


def test_submit_wait_lease_and_acknowledge(service: Scripted) -> None:
    service.on("POST", GROUPS, BROKEN, accept)
    path = "/groups/mine-0%3A0/"
    service.on("GET", path, group("open", "mine-0:0"), group("ready", "mine-0:0"))
    good = shapes.json_batch(shapes.trajectory(0))
    service.on("POST", shapes.BATCHES, Reply(204), problem(503, "x", retry_after=0), good)
    service.on("POST", ACK, Reply(body=shapes.batch(state="acknowledged")))
    service.on("POST", NACK, Reply(body=shapes.batch(state="returned")))

    async def body(experiment: AsyncExperiment) -> None:
        (made,) = await experiment.submit(["sum"], idempotency_key="mine")
        ready = await experiment.client.wait([made])
        assert [each.state for each in ready] == ["ready"]
        async for batch in experiment.batches(groups=1, limit=1):
            async with batch:
                shapes.same_tokens(batch.trajectories[0].segments[0], shapes.segment())
        with pytest.raises(ZeroDivisionError):
            async with await experiment.lease(groups=1):
                raise ZeroDivisionError

    run(service, body)
    assert (len(service.calls("POST", ACK)), len(service.calls("POST", NACK))) == (1, 1)


def test_update_of_a_policy(service: Scripted) -> None:
    service.on("GET", "/policies/p1/", Reply(body=POLICY))
    service.on("POST", UPDATES, update("quiescing"))
    service.on("GET", UPDATE, update("quiescing"), update("ready"))
    service.on("POST", COMPLETE, update("completed"))
    service.on("POST", ABANDON, update("abandoned"))

    async def body(experiment: AsyncExperiment) -> None:
        policy = await experiment.client.policy("p1")
        async with policy.update(4) as held:
            assert held.state == "ready"
        with pytest.raises(ValueError, match="no weights"):
            async with policy.update(5):
                raise ValueError("no weights")

    run(service, body)
    assert (len(service.calls("POST", COMPLETE)), len(service.calls("POST", ABANDON))) == (1, 1)


def test_events_and_lists(service: Scripted) -> None:
    service.on(
        "GET", "/experiments/e1/events/", stream(STREAM, cut=len(STREAM) - 20), stream(STREAM)
    )
    service.on("GET", "/experiments/e1/groups/", page(group("open").body, group("ready").body))

    async def body(experiment: AsyncExperiment) -> None:
        kinds = []
        async for event in experiment.events():
            kinds.append(event.kind)
            if len(kinds) == 3:
                break
        assert kinds == ["group.ready", "group.ready", "counts"]
        assert [each.state async for each in experiment.groups()] == ["open", "ready"]

    run(service, body)


def test_waiting_does_not_block_the_loop(service: Scripted) -> None:
    good = shapes.json_batch(shapes.trajectory(0))
    service.on("POST", shapes.BATCHES, Reply(204), Reply(204), good)
    service.on("POST", GROUPS, accept)

    async def body(experiment: AsyncExperiment) -> None:
        batch, groups = await asyncio.gather(
            experiment.lease(groups=1), experiment.submit(["a", "b"])
        )
        assert (len(batch), len(groups)) == (1, 2)

    run(service, body)


def test_cancelled_wait_leaves_no_update_open(service: Scripted) -> None:
    service.on("GET", "/policies/p1/", Reply(body=POLICY))
    service.on("POST", UPDATES, update("quiescing"))
    service.on("GET", UPDATE, update("quiescing"))
    service.on("POST", ABANDON, update("abandoned"))

    async def body(experiment: AsyncExperiment) -> None:
        policy = await experiment.client.policy("p1")

        async def hold() -> None:
            async with policy.update(4):
                pytest.fail("the body must not run")

        task = asyncio.create_task(hold())
        await asyncio.to_thread(service.wait_for, "GET", UPDATE, 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(service, body)
    assert len(service.calls("POST", ABANDON)) == 1


def test_synchronous_client_is_generated_from_the_asynchronous_one() -> None:
    generator = Path(prorl_client.__file__).parents[1] / "generate_sync.py"
    ruff = Path(sys.executable).parent / "ruff"
    if not (generator.exists() and ruff.exists() and find_spec("unasync")):
        reason = "needs the source, ruff and unasync"
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)

    done = subprocess.run(
        [sys.executable, str(generator), "--check"], capture_output=True, text=True, timeout=120
    )

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
