"""What many rollouts cost their run worker: memory, processor time, and how evenly they go on."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import psutil

from benchmarks.rollouts.line import Line

MIB = 1024 * 1024
LONGEST_SECONDS = 900.0


@dataclass(frozen=True, kw_only=True)
class Usage:
    """What a process uses now; `pss_mib` counts shared pages by their share."""

    waiting: int
    pss_mib: float
    private_mib: float
    threads: int
    files: int
    database_connections: int
    store_connections: int

    def as_dict(self) -> dict[str, Any]:
        """Return it by name."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How the rollouts of one run went on, all in seconds but counts and ratios."""

    rollouts: int
    turns: int
    seconds: float
    to_ideal: float
    worker_cpu_per_turn: float
    helpers_cpu_per_turn: float
    worker_cores: float
    turn_median: float
    turn_p95: float
    turn_longest: float
    rollout_median: float
    rollout_longest: float
    database_connections: int

    def as_dict(self) -> dict[str, Any]:
        """Return it by name."""
        return asdict(self)


def worker(line: Line) -> psutil.Process:
    """Return the run worker's process."""
    return psutil.Process(line.stack.started().running["run"].pid)


def usage(line: Line, waiting: int) -> Usage:
    """Measure the run worker with so many rollouts that wait."""
    process = worker(line)
    memory = process.memory_full_info()
    sockets = process.net_connections(kind="inet")
    assert line.stack.engines is not None
    port = line.stack.engines.broker_port
    return Usage(
        waiting=waiting,
        pss_mib=memory.pss / MIB,
        private_mib=memory.uss / MIB,
        threads=process.num_threads(),
        files=process.num_fds(),
        database_connections=_database_connections(line),
        store_connections=sum(bool(each.raddr) and each.raddr.port == port for each in sockets),
    )


def memory_of_waiting(line: Line, counts: Sequence[int]) -> tuple[list[Usage], list[str]]:
    """Let more and more rollouts wait together; return what each step uses, and the rollouts.

    They are held by the server when this returns. One round of rollouts has run before, so that
    what the process loads once is there.
    """
    line.control(together=0, latency_seconds=0.1)
    warm = line.submit(8)
    line.wait_done(warm)
    found = [usage(line, 0)]
    line.control(together=10**9)
    rollouts: list[str] = []
    for count in counts:
        rollouts += line.submit(count - len(rollouts))
        line.wait_held(count)
        found.append(usage(line, count))
    return found, rollouts


def pace(line: Line, rollouts: Sequence[str], *, latency: float, turns: int) -> Pace:
    """Let held rollouts go, and measure until all of them have left RUN.

    Meanwhile nothing is graded: a rollout's journal, which tells when its turns were, ends with it.
    """
    line.stack.started().stop("eval")
    process = worker(line)
    own, helpers = _cpu(process)
    began, stamp = time.monotonic(), line.sql("SELECT now()")[0][0]
    most = _Most(lambda: _database_connections(line))
    line.control(together=0, latency_seconds=latency)
    left = "SELECT count(DISTINCT rollout_id) FROM rollouts_attempt "
    left += "WHERE rollout_id = ANY(%s) AND stage = 'run' AND state = 'finished'"
    with most, line.telling(rollouts):
        line.wait(
            lambda: line.sql(left, list(rollouts))[0][0] == len(rollouts),
            "the end of every RUN",
            LONGEST_SECONDS,
        )
    seconds = time.monotonic() - began
    own, helpers = (
        after - before for after, before in zip(_cpu(process), (own, helpers), strict=True)
    )
    gaps, whole = _turns(line, rollouts, stamp)
    line.stack.start("eval")
    count = len(rollouts) * turns
    return Pace(
        rollouts=len(rollouts),
        turns=count,
        seconds=seconds,
        to_ideal=turns * latency / seconds,
        worker_cpu_per_turn=own / count,
        helpers_cpu_per_turn=helpers / count,
        worker_cores=own / seconds,
        turn_median=statistics.median(gaps),
        turn_p95=_percentile(gaps, 0.95),
        turn_longest=max(gaps),
        rollout_median=statistics.median(whole),
        rollout_longest=max(whole),
        database_connections=most.value,
    )


class _Most:
    """Ask twice a second from a thread, and keep the largest answer."""

    def __init__(self, ask: Callable[[], int]) -> None:
        self.value = 0
        self._ask = ask
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(0.5):
            self.value = max(self.value, self._ask())


def _turns(line: Line, rollouts: Sequence[str], since: Any) -> tuple[list[float], list[float]]:
    """Return the seconds of every turn, and of every rollout from `since` to its last turn."""
    query = """
        SELECT rollout_id, extract(epoch FROM created_at - %s)::float
        FROM rollouts_journalentry WHERE rollout_id = ANY(%s) AND kind = 'sampled'
        ORDER BY rollout_id, turn
    """
    moments: dict[Any, list[float]] = {}
    for rollout, moment in line.sql(query, since, list(rollouts)):
        moments.setdefault(rollout, [0.0]).append(moment)
    gaps = [later - before for each in moments.values() for before, later in pairwise(each)]
    return gaps, [each[-1] for each in moments.values()]


def _database_connections(line: Line) -> int:
    """Return the connections of all processes of the stack."""
    return int(
        line.sql("SELECT count(*) FROM pg_stat_activity WHERE application_name = 'prorl'")[0][0]
    )


def _cpu(process: psutil.Process) -> tuple[float, float]:
    """Return the processor seconds of a process, and of its living and ended children."""
    times = process.cpu_times()
    living = 0.0
    for child in process.children(recursive=True):
        try:
            used = child.cpu_times()
        except psutil.NoSuchProcess:
            continue
        living += used.user + used.system
    return times.user + times.system, times.children_user + times.children_system + living


def _percentile(values: Sequence[float], part: float) -> float:
    return sorted(values)[min(len(values) - 1, int(part * len(values)))]
