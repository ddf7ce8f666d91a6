"""Time a transfer, and watch the process that sends it."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

MIB = 2**20
RECEIVE = 4 * MIB


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """One transfer: its bytes, and what it took of the sending process."""

    bytes: int
    seconds: float
    first_byte_seconds: float
    cpu_seconds: float
    peak_mib: float

    @property
    def rate(self) -> float:
        """Return millions of bytes a second."""
        return self.bytes / self.seconds / 1e6


def fetch(address: tuple[str, int], request: bytes, process: psutil.Process) -> Transfer:
    """Send a request and read the answer to its end. Raises RuntimeError unless it is 200."""
    buffer = memoryview(bytearray(RECEIVE))
    before = process.memory_info().rss
    used = sum(process.cpu_times()[:2])
    with peak_of(process) as peak:
        began = time.perf_counter()
        with socket.create_connection(address) as link:
            link.sendall(request)
            total = first = link.recv_into(buffer)
            first_at = time.perf_counter()
            if b" 200 " not in bytes(buffer[: min(first, 40)]):
                raise RuntimeError(bytes(buffer[:first]).decode(errors="replace"))
            while received := link.recv_into(buffer):
                total += received
        ended = time.perf_counter()
    return Transfer(
        bytes=total,
        seconds=ended - began,
        first_byte_seconds=first_at - began,
        cpu_seconds=sum(process.cpu_times()[:2]) - used,
        peak_mib=max(0.0, peak() - before) / MIB,
    )


@contextmanager
def peak_of(process: psutil.Process) -> Iterator[Callable[[], int]]:
    """Watch a process's memory; give what its largest was."""
    largest = process.memory_info().rss
    over = threading.Event()

    def watch() -> None:
        nonlocal largest
        while not over.wait(0.005):
            largest = max(largest, process.memory_info().rss)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield lambda: largest
    finally:
        over.set()
        thread.join()


def cat(files: list[Path]) -> float:
    """Return the seconds that the same bytes take through a socket, by the kernel alone."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def send() -> None:
            link, _ = server.accept()
            with link:
                for path in files:
                    with path.open("rb") as stream:
                        link.sendfile(stream)

        thread = threading.Thread(target=send)
        thread.start()
        buffer = memoryview(bytearray(RECEIVE))
        began = time.perf_counter()
        with socket.create_connection(server.getsockname()) as link:
            while link.recv_into(buffer):
                pass
        seconds = time.perf_counter() - began
        thread.join()
    return seconds
