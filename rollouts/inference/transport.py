"""Send HTTP requests that can be cancelled while they wait, over kept connections."""

import asyncio
import os
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from typing import Any

import httpx

from rollouts.inference.exceptions import (
    GenerationCancelled,
    GenerationTimeout,
    MalformedAnswer,
    ServerUnreachable,
)
from rollouts.inference.protocol import Cancelled

CANCEL_POLL_SECONDS = 0.25
CONNECT_SECONDS = 5.0
# Below the 5 s after which uvicorn, and so vLLM, closes an idle connection.
KEEP_ALIVE_SECONDS = 4.0
MAX_ANSWER_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Response:
    """Hold a whole answer; header names in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class Transport:
    """Send requests from any thread through one event loop and one connection pool.

    httpx's blocking client cannot give up a request before its timeout; a task can be
    cancelled at any await, which closes its connection and so tells the server.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pid = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._client: httpx.AsyncClient | None = None

    def request(
        self,
        method: str,
        url: str,
        *,
        json: Any = None,
        timeout_seconds: float,
        cancelled: Cancelled | None = None,
    ) -> Response:
        """Send one request and return the answer whatever its status.

        Raises ServerUnreachable, GenerationTimeout, GenerationCancelled, or MalformedAnswer
        for an answer that is too large.
        """
        if timeout_seconds <= 0:
            raise GenerationTimeout("no time was left to ask the server")
        loop = self._running_loop()
        future = asyncio.run_coroutine_threadsafe(
            self._send(method, url, json, timeout_seconds), loop
        )
        try:
            return _wait(future, time.monotonic() + timeout_seconds + 1.0, cancelled)
        except TimeoutError as error:
            raise GenerationTimeout(f"{url} did not answer in {timeout_seconds:.1f} s") from error
        except httpx.HTTPError as error:
            reason = str(error) or type(error).__name__
            raise ServerUnreachable(f"{url} cannot be reached: {reason}") from error
        except httpx.InvalidURL as error:
            raise ServerUnreachable(f"{url!r} is no address: {error}") from error

    def close(self) -> None:
        """Close every connection and end the loop's thread."""
        with self._lock:
            loop, client, self._loop, self._client = self._loop, self._client, None, None
            if loop is None or client is None or self._pid != os.getpid():
                return
        asyncio.run_coroutine_threadsafe(client.aclose(), loop).result(timeout=5)
        loop.call_soon_threadsafe(loop.stop)

    async def _send(self, method: str, url: str, json: Any, timeout_seconds: float) -> Response:
        async with asyncio.timeout(timeout_seconds):
            try:
                return await self._send_once(method, url, json)
            except httpx.RemoteProtocolError as error:
                # The server closed a kept connection just as it was used again.
                if "without sending a response" not in str(error):
                    raise
                return await self._send_once(method, url, json)

    async def _send_once(self, method: str, url: str, json: Any) -> Response:
        assert self._client is not None
        async with self._client.stream(method, url, json=json) as response:
            body = bytearray()
            async for part in response.aiter_bytes():
                body += part
                if len(body) > MAX_ANSWER_BYTES:
                    raise MalformedAnswer(f"{url} sent more than {MAX_ANSWER_BYTES} bytes")
            headers = {name.lower(): value for name, value in response.headers.items()}
            return Response(response.status_code, headers, bytes(body))

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        """Return the loop of this process, starting it on first use (also after a fork)."""
        with self._lock:
            if self._loop is not None and self._pid == os.getpid():
                return self._loop
            loop = asyncio.new_event_loop()
            self._client = httpx.AsyncClient(
                timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),
                limits=httpx.Limits(
                    max_connections=None,
                    max_keepalive_connections=256,
                    keepalive_expiry=KEEP_ALIVE_SECONDS,
                ),
                follow_redirects=False,
                trust_env=False,
            )
            self._loop, self._pid = loop, os.getpid()
            threading.Thread(target=_run_loop, args=(loop,), name="inference", daemon=True).start()
            return loop


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.close()


def _wait(future: "Future[Response]", deadline: float, cancelled: Cancelled | None) -> Response:
    try:
        while True:
            if cancelled is not None and cancelled():
                raise GenerationCancelled("the request was cancelled")
            try:
                return future.result(timeout=CANCEL_POLL_SECONDS)
            except FutureTimeout:
                if future.done() or time.monotonic() > deadline:
                    raise
    finally:
        future.cancel()
