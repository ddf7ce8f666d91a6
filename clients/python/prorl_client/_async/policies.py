"""Policies and the updates of their weights."""

from __future__ import annotations

import logging
from asyncio import sleep
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING

from prorl_client.calls import new_key, segment
from prorl_client.errors import Conflict, ProblemError, ProrlError, WaitTimedOut
from prorl_client.records import PolicyRecord, UpdateRecord
from prorl_client.retries import Pauses

if TYPE_CHECKING:
    from prorl_client._async.client import AsyncClient

logger = logging.getLogger("prorl_client")

# Completing may work a little later: servers that load, a store that began anew.
NOT_YET = ("policy.update_not_ready", "policy.update_not_quiet", "policy.version_mismatch")
PAUSES = Pauses(first_seconds=0.05, longest_seconds=1.0)


@dataclass(frozen=True, kw_only=True)
class AsyncPolicyUpdate(UpdateRecord):
    """An update of a policy's weights as it stood when it was asked for."""

    client: AsyncClient = field(repr=False, compare=False)

    @property
    def path(self) -> str:
        """Where it is."""
        return f"/policies/{segment(self.policy)}/updates/{self.number}/"

    async def refresh(self) -> AsyncPolicyUpdate:
        """Return it as it stands now."""
        return self._parse(await self.client.get(self.path))

    async def wait_ready(self, timeout: float | None = None) -> AsyncPolicyUpdate:
        """Return it once weights may be exchanged. Raises WaitTimedOut, Conflict when it ended."""
        end = None if timeout is None else monotonic() + timeout
        found, looks = self, 0
        while found.state == "quiescing":
            pause = PAUSES.after(looks)
            if end is not None and monotonic() + pause > end:
                raise WaitTimedOut(f"Update {self.number} is not ready: {found.detail}")
            await sleep(pause)
            looks += 1
            found = await self.refresh()
        if found.state not in ("ready", "completed"):
            raise Conflict(
                status=409,
                code="policy.update_ended",
                detail=f"Update {self.number} was {found.state}: {found.detail}",
            )
        return found

    async def complete(self, timeout: float = 0.0) -> AsyncPolicyUpdate:
        """Go on with the new version; insist for `timeout` seconds while servers are not ready.

        Raises Conflict. Completing again changes nothing.
        """
        end, looks = monotonic() + timeout, 0
        while True:
            try:
                return self._parse(await self.client.post(f"{self.path}complete/"))
            except Conflict as fault:
                pause = PAUSES.after(looks)
                if fault.code not in NOT_YET or monotonic() + pause > end:
                    raise
                logger.info("update %d: %s", self.number, fault.detail)
            await sleep(pause)
            looks += 1

    async def abandon(self, detail: str = "") -> AsyncPolicyUpdate:
        """Go on with the old version. Raises Conflict when it was completed."""
        body = {"detail": detail[:1000]}
        return self._parse(await self.client.post(f"{self.path}abandon/", body))

    def _parse(self, data: dict[str, object]) -> AsyncPolicyUpdate:
        return AsyncPolicyUpdate.parse(data, client=self.client)


@dataclass(frozen=True, kw_only=True)
class AsyncPolicy(PolicyRecord):
    """A policy as it stood when it was asked for."""

    client: AsyncClient = field(repr=False, compare=False)

    async def refresh(self) -> AsyncPolicy:
        """Return it as it stands now."""
        return await self.client.policy(self.id)

    async def begin_update(
        self,
        version: int,
        *,
        mode: str = "abort",
        control: bool = False,
        idempotency_key: str | None = None,
    ) -> AsyncPolicyUpdate:
        """Begin an update of the weights; complete or abandon it. See `update`."""
        path = f"/policies/{segment(self.id)}/updates/"
        body = {"version": version, "mode": mode, "control": control}
        data = await self.client.post(path, body, key=idempotency_key or new_key())
        return AsyncPolicyUpdate.parse(data, client=self.client)

    async def updates(self) -> AsyncIterator[AsyncPolicyUpdate]:
        """Yield the updates, the newest first."""
        async for row in self.client.pages(f"/policies/{segment(self.id)}/updates/"):
            yield AsyncPolicyUpdate.parse(row, client=self.client)

    @asynccontextmanager
    async def update(
        self,
        version: int,
        *,
        mode: str = "abort",
        control: bool = False,
        ready_timeout: float | None = 600.0,
        complete_timeout: float = 60.0,
    ) -> AsyncIterator[AsyncPolicyUpdate]:
        """Hold generation back as `mode` says, let the body exchange the weights, and go on.

        The body runs once the update is ready. After it the update is completed, for which every
        server is asked for its version. When the body raises, the update does not become ready, or
        cannot be completed within `complete_timeout`, it is abandoned: the old version goes on.
        """
        update = await self.begin_update(version, mode=mode, control=control)
        try:
            yield await update.wait_ready(ready_timeout)
            await update.complete(complete_timeout)
        except BaseException as fault:
            await _give_up(update, fault)
            raise


async def _give_up(update: AsyncPolicyUpdate, why: BaseException) -> None:
    """Abandon an update; what went wrong before is what the caller must see."""
    detail = f"{type(why).__name__}: {why}" if str(why) else type(why).__name__
    try:
        await update.abandon(detail)
    except ProblemError as fault:
        if fault.code != "policy.update_ended":
            logger.warning("update %d was not abandoned: %s", update.number, fault)
    except ProrlError as fault:
        logger.warning("update %d was not abandoned: %s", update.number, fault)
