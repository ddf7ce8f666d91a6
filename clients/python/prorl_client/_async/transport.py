"""Send calls and receive answers, again and again where that helps."""

from __future__ import annotations

import logging
import os
from asyncio import sleep
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from time import monotonic
from typing import Any
from uuid import uuid4

import httpx

from prorl_client.calls import PREFIX, WAIT_MARGIN_SECONDS, Answer, Call
from prorl_client.config import Address
from prorl_client.errors import ProblemError, ServiceUnreachable, problem_from
from prorl_client.retries import RUNNING, RetryPolicy
from prorl_client.version import __version__

logger = logging.getLogger("prorl_client")

CONNECT_SECONDS = 10.0
MAX_PROBLEM_BYTES = 1_000_000
PIECE_BYTES = 256 * 1024


async def _pieces(path: Path) -> AsyncIterator[bytes]:
    """Yield a file piece by piece."""
    with path.open("rb") as stream:
        while piece := stream.read(PIECE_BYTES):
            yield piece


class AsyncTransport:
    """A connection pool to one service, and how long it insists."""

    def __init__(
        self,
        address: Address,
        *,
        retries: RetryPolicy,
        timeout: float,
        http_options: Mapping[str, Any],
    ) -> None:
        self.address = address
        self.retries = retries
        self.timeout = timeout
        self._http_options = dict(http_options)
        self._process = os.getpid()
        self._http = self._connect()

    async def send(self, call: Call) -> Answer:
        """Return the answer of a call, sent until it succeeds or insisting ends.

        Raises ProblemError for a refusal, ServiceUnreachable when no answer came.
        """
        began, tries = monotonic(), 0
        while True:
            tries += 1
            try:
                return await self._send_once(call)
            except (ProblemError, httpx.TransportError) as fault:
                pause = self.retries.pause(tries, fault)
                left = began + self.retries.total_seconds + call.wait_seconds - monotonic()
                if pause is None or pause > left:
                    if isinstance(fault, ProblemError):
                        raise
                    raise self._unreachable(call, tries, fault) from fault
                running = isinstance(fault, ProblemError) and fault.code == RUNNING
                level = logging.INFO if running else logging.WARNING
                logger.log(level, "%s: %s; again in %.1f s", call.words, fault, pause)
            await sleep(pause)

    async def open(self, call: Call) -> httpx.Response:
        """Return an answer whose body is yet to be read, and closed by the caller; one try."""
        request_id = uuid4().hex
        response = await self._client().send(self._request(call, request_id), stream=True)
        if not response.is_success:
            await self._refuse(call, response, request_id)
        return response

    async def close(self) -> None:
        """Close the connections."""
        if self._process == os.getpid():
            await self._http.aclose()

    def clone_options(self) -> dict[str, Any]:
        """Return what another transport to the same service is made from."""
        return {
            "address": self.address,
            "timeout": self.timeout,
            "http_options": self._http_options,
        }

    async def _send_once(self, call: Call) -> Answer:
        response = await self.open(call)
        try:
            sink = call.sink(response.headers.get("content-type", ""))
            async for chunk in response.aiter_bytes():
                sink.feed(chunk)
        finally:
            await response.aclose()
        content = None if response.status_code == 204 else sink.close()
        return Answer(response.status_code, response.headers, content)

    def _request(self, call: Call, request_id: str) -> httpx.Request:
        path = call.path if call.path.startswith(("http://", "https://")) else PREFIX + call.path
        read = self.timeout + (call.wait_seconds and call.wait_seconds + WAIT_MARGIN_SECONDS)
        headers = {"X-Request-ID": request_id, **call.headers}
        if call.file is not None:
            headers["Content-Length"] = str(call.file.stat().st_size)
        return self._client().build_request(
            call.method,
            path,
            content=call.body if call.file is None else _pieces(call.file),
            params=call.params or None,
            headers=headers,
            timeout=httpx.Timeout(self.timeout, connect=CONNECT_SECONDS, read=read),
        )

    async def _refuse(self, call: Call, response: httpx.Response, request_id: str) -> None:
        """Read the refusal and raise it."""
        body = b""
        try:
            async for chunk in response.aiter_bytes():
                body += chunk
                if len(body) > MAX_PROBLEM_BYTES:
                    break
        finally:
            await response.aclose()
        raise problem_from(
            status=response.status_code,
            headers=response.headers,
            body=body,
            call=call.words,
            request_id=request_id,
        )

    def _client(self) -> httpx.AsyncClient:
        if self._process != os.getpid():  # a forked child must not share its parent's connections
            self._process, self._http = os.getpid(), self._connect()
        return self._http

    def _connect(self) -> httpx.AsyncClient:
        headers = {
            "Authorization": f"Bearer {self.address.token}",
            "User-Agent": f"prorl-client/{__version__}",
            "Accept": "application/json",
            **(self._http_options.get("headers") or {}),
        }
        return httpx.AsyncClient(
            **{**self._http_options, "base_url": self.address.url, "headers": headers}
        )

    def _unreachable(self, call: Call, tries: int, fault: Exception) -> ServiceUnreachable:
        what = str(fault) or type(fault).__name__
        return ServiceUnreachable(
            f"{call.words}: no answer from {self.address.url} in {tries} tries: {what}. "
            "Is the address right, and the service up?"
        )
