"""Send HTTP requests that can end while they wait, over kept connections."""

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import CancelledError as FutureCancelled
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import aiohttp
import msgspec
import uvloop

from rollouts.inference.exceptions import (
    GenerationCancelled,
    GenerationTimeout,
    MalformedAnswer,
    ServerUnreachable,
)
from rollouts.inference.protocol import Cancelled
from rollouts.inference.streams import DONE, EventReader
from rollouts.inference.watch import Ticket, Watch

CONNECT_SECONDS = 5.0
# Below the 5 s after which uvicorn, and so vLLM, closes an idle connection.
KEEP_ALIVE_SECONDS = 4.0
MAX_ANSWER_BYTES = 64 * 1024 * 1024
# How long the end of the body may take after the last event, to keep the connection.
TAIL_SECONDS = 0.25
# Reading every token as it comes takes 0.1 ms each. A stream is read this often at most, the less
# often the more streams there are; the kernel keeps meanwhile what comes. One that is slower by
# itself is left alone: to stop and to resume it would cost as much as to read it.
LEAST_PACE_SECONDS = 0.02
PACE_SECONDS_PER_STREAM = 0.002
LONGEST_PACE_SECONDS = 0.1

# Takes the data of one event; returns True when no more is needed. Called in the loop's thread.
Collect = Callable[[bytes], bool]
Headers = Mapping[str, str]
Ending = Literal["end", "enough", "interrupted"]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Response:
    """Hold a whole answer; header names in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class Transport:
    """Send requests from any thread through one event loop and one connection pool.

    A blocking client cannot give up a request before its timeout; a task can be cancelled at any
    await, which closes its connection and so tells the server. aiohttp, because its parser in C
    takes a turn of 200 events for half the processor time that httpx needs.

    `cancelled` and `interrupted` are asked before sending and then every 50 ms, every 0.1 s where
    500 are under way, from one thread that all requests share: they must answer at once.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pid = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        # One keeps connections, the other opens one for each request.
        self._clients: tuple[aiohttp.ClientSession, aiohttp.ClientSession] | None = None
        self._watch = Watch()
        self._streams = 0

    def request(
        self,
        method: str,
        url: str,
        *,
        json: Any = None,
        headers: Headers | None = None,
        timeout_seconds: float,
        cancelled: Cancelled | None = None,
    ) -> Response:
        """Send one request and return the answer whatever its status.

        Raises ServerUnreachable, GenerationTimeout, GenerationCancelled, or MalformedAnswer
        for an answer that is too large.
        """

        async def send() -> Response:
            async with await self._begin(method, url, json, headers) as response:
                return await _whole(response)

        answer = self._run(url, send, timeout_seconds, cancelled, None)
        assert answer is not None
        return answer

    def stream(
        self,
        url: str,
        collect: Collect,
        *,
        json: Any,
        headers: Headers | None = None,
        timeout_seconds: float,
        cancelled: Cancelled | None = None,
        interrupted: Cancelled | None = None,
    ) -> Response | Ending:
        """Post a request and hand every event of the answer to `collect`, in order.

        Returns the whole answer where it is no stream of events with status 200; else `end` when
        the stream ended, whole or not, `enough` when `collect` wanted no more, `interrupted` when
        the caller did. What `collect` raises is raised here. Raises as `request` does.
        """

        async def send() -> Response | Ending:
            async with await self._begin("POST", url, json, headers) as response:
                kind = response.headers.get("content-type", "")
                if response.status != 200 or not kind.startswith("text/event-stream"):
                    return await _whole(response)
                self._streams += 1
                try:
                    return await self._collect(response, collect)
                finally:
                    self._streams -= 1

        return self._run(url, send, timeout_seconds, cancelled, interrupted) or "interrupted"

    def close(self) -> None:
        """Close every connection and end the threads."""
        self._watch.stop()
        with self._lock:
            loop, clients, self._loop, self._clients = self._loop, self._clients, None, None
            if loop is None or clients is None or self._pid != os.getpid():
                return
        for client in clients:
            asyncio.run_coroutine_threadsafe(client.close(), loop).result(timeout=5)
        loop.call_soon_threadsafe(loop.stop)

    def _run(
        self,
        url: str,
        send: Callable[[], Coroutine[Any, Any, T]],
        timeout_seconds: float,
        cancelled: Cancelled | None,
        interrupted: Cancelled | None,
    ) -> T | None:
        """Run one exchange in the loop; None when the caller interrupted it."""
        if timeout_seconds <= 0:
            raise GenerationTimeout("no time was left to ask the server")
        loop = self._running_loop()
        task: asyncio.Task[T] | None = None

        async def exchange() -> T:
            nonlocal task
            task = asyncio.current_task()
            if ticket.verdict is not None or ticket.error is not None:
                raise asyncio.CancelledError
            async with asyncio.timeout(timeout_seconds):
                return await send()

        def stop() -> None:
            loop.call_soon_threadsafe(lambda: task is not None and task.cancel())

        ticket = Ticket([("cancelled", cancelled), ("interrupted", interrupted)], stop)
        if not ticket.poll():
            future = asyncio.run_coroutine_threadsafe(exchange(), loop)
            if ticket.questions:
                self._watch.add(ticket)
            try:
                return future.result(timeout=timeout_seconds + CONNECT_SECONDS)
            except FutureCancelled:
                if ticket.verdict is None and ticket.error is None:
                    raise ServerUnreachable(f"{url} was asked as this process ended") from None
            except aiohttp.InvalidURL as error:
                raise ServerUnreachable(f"{url!r} is no address: {error}") from error
            except aiohttp.ClientError as error:
                reason = str(error) or type(error).__name__
                raise ServerUnreachable(f"{url} cannot be reached: {reason}") from error
            except TimeoutError as error:
                stop()
                raise GenerationTimeout(
                    f"{url} did not answer in {timeout_seconds:.1f} s"
                ) from error
            except (ValueError, OSError) as error:
                raise ServerUnreachable(f"{url!r} cannot be reached: {error}") from error
            finally:
                self._watch.remove(ticket)
        if ticket.error is not None:
            raise ticket.error
        if ticket.verdict == "cancelled":
            raise GenerationCancelled("the request was cancelled")
        return None

    async def _begin(
        self, method: str, url: str, json: Any, headers: Headers | None
    ) -> aiohttp.ClientResponse:
        """Send a request, and return its answer once the head of it is there."""
        assert self._clients is not None
        keeping, fresh = self._clients
        named, body = dict(headers or {}), None
        if json is not None:
            named["Content-Type"] = "application/json"
            body = msgspec.json.encode(json)
        request: dict[str, Any] = {"data": body, "headers": named, "allow_redirects": False}
        try:
            return await keeping.request(method, url, **request)
        except aiohttp.ClientConnectorError:
            raise
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
            # The server closed a kept connection just as it was used again; another kept one may
            # be closed too.
            return await fresh.request(method, url, **request)

    async def _collect(self, response: aiohttp.ClientResponse, collect: Collect) -> Ending:
        reader, size, since = EventReader(), 0, 0.0
        while part := await response.content.readany():
            size += len(part)
            if size > MAX_ANSWER_BYTES:
                raise MalformedAnswer(f"{response.url} sent more than {MAX_ANSWER_BYTES} bytes")
            for event in reader.feed(part):
                if event == DONE:
                    await _tail(response)
                    return "end"
                if collect(event):
                    return "enough"
            since = await self._pause(response, since)
        return "end"

    async def _pause(self, response: aiohttp.ClientResponse, since: float) -> float:
        """Let the kernel collect what comes for a while, unless it came slowly since then.

        Both times are the loop's; the one returned is that from which on the next is awaited.
        """
        loop = asyncio.get_running_loop()
        pace = max(LEAST_PACE_SECONDS, self._streams * PACE_SECONDS_PER_STREAM)
        pace = min(pace, LONGEST_PACE_SECONDS)
        socket = response.connection.transport if response.connection is not None else None
        if socket is None or response.content.at_eof() or loop.time() - since >= pace:
            return loop.time()
        socket.pause_reading()
        await asyncio.sleep(pace)
        if not socket.is_closing():
            socket.resume_reading()
        return loop.time()

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        """Return the loop of this process, starting it on first use (also after a fork)."""
        with self._lock:
            if self._loop is not None and self._pid == os.getpid():
                return self._loop
            loop = uvloop.new_event_loop()
            threading.Thread(target=_run_loop, args=(loop,), name="inference", daemon=True).start()
            self._clients = asyncio.run_coroutine_threadsafe(_clients(), loop).result()
            self._loop, self._pid, self._streams = loop, os.getpid(), 0
            return loop


async def _clients() -> tuple[aiohttp.ClientSession, aiohttp.ClientSession]:
    keeping = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_SECONDS)
    return _client(keeping), _client(aiohttp.TCPConnector(limit=0, force_close=True))


def _client(connector: aiohttp.TCPConnector) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=connector,
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
        # Compressed, a small answer could unfold into a huge one before it is measured.
        headers={"Accept-Encoding": "identity"},
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        trust_env=False,
    )


async def _whole(response: aiohttp.ClientResponse) -> Response:
    body = bytearray()
    while part := await response.content.readany():
        body += part
        if len(body) > MAX_ANSWER_BYTES:
            raise MalformedAnswer(f"{response.url} sent more than {MAX_ANSWER_BYTES} bytes")
    headers = {name.lower(): value for name, value in response.headers.items()}
    return Response(response.status, headers, bytes(body))


async def _tail(response: aiohttp.ClientResponse) -> None:
    """Read the end of a body whose last event came, so that its connection can be kept."""
    try:
        async with asyncio.timeout(TAIL_SECONDS):
            await response.content.readany()
    except (TimeoutError, aiohttp.ClientError):
        pass


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.close()
