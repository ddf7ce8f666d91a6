"""What a rollout saves by going back to the server that has seen its prompt, on real servers.

Tiny servers (a real model, which counts the prompt tokens that it need not compute) share rollouts
of several turns, with a tool's time between them, through the product's pool and router. Without
stickiness every turn is a rollout of its own to the router, so that the fewest tokens in flight
decide alone. A turn samples one token: its time is its prompt's. Both ways take the same prompts,
and share nothing by their salts.
"""

from __future__ import annotations

import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import redis

from examples.tiny_server.server import MODEL_NAME
from prorl_site.stack.engines import free_port
from rollouts.inference.adapters import default_adapters
from rollouts.inference.pool import InferencePool
from rollouts.inference.protocol import SamplingParams, Server
from rollouts.inference.router import Router

ROOT = Path(__file__).parents[1]
SERVERS, SLOTS = 2, 4
ROLLOUTS, TURNS, AT_ONCE = 12, 5, 6
FIRST_TOKENS, TURN_TOKENS = 96, 64
START_SECONDS = 120.0
# A tool's work between two turns. Without it the server that was just left is the least busy one,
# and gets its rollout back by itself.
TOOL_SECONDS = (0.3, 1.5)
WAYS = ("with", "without")


@contextmanager
def tiny_servers(count: int, cache: Path) -> Iterator[list[Server]]:
    """Start tiny servers, one core each; yields them once they answer."""
    ports = [free_port() for _ in range(count)]
    processes = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "examples.tiny_server"),
                *("--port", str(port), "--cache-dir", str(cache)),
            ],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for port in ports
    ]
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    try:
        for url in urls:
            _await(url)
        yield [
            Server(f"tiny{number}", url, "vllm", MODEL_NAME, SLOTS, pool="tiny")
            for number, url in enumerate(urls)
        ]
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()


def measure(client: redis.Redis, *, rounds: int, seed: int, cache: Path) -> list[dict[str, Any]]:
    """Return one row per way: the share of prompt tokens cached, seconds of each turn's prompt."""
    found: dict[str, list[list[tuple[float, int, int]]]] = {way: [] for way in WAYS}
    with tiny_servers(SERVERS, cache) as servers:
        for number in range(rounds):
            ways = list(WAYS)
            random.Random(seed + number).shuffle(ways)
            for way in ways:
                found[way] += _play(client, servers, way, f"{seed}-{number}")
    return [_row(way, found[way]) for way in WAYS]


def as_markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Return the table."""
    lines = [
        "| Stickiness | Prompt tokens cached | Prompt time by turn, ms | from the second |",
        "|---|---|---|---|",
    ]
    for row in rows:
        turns = " / ".join(f"{1000 * each:.0f}" for each in row["seconds"])
        later = f"{1000 * row['later_seconds']:.0f}"
        lines.append(f"| {row['way']} | {row['cached']:.0%} | {turns} | {later} |")
    return "\n".join(lines) + "\n"


def _await(url: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            httpx.get(f"{url}/health", timeout=2).raise_for_status()
        except httpx.HTTPError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
        else:
            return


def _play(
    client: redis.Redis, servers: list[Server], way: str, name: str
) -> list[list[tuple[float, int, int]]]:
    """Run all rollouts; returns for each its turns as seconds, cached and all prompt tokens."""
    pool = InferencePool(
        Router(client, f"prefixes-{way}-{name}"), default_adapters(), lambda: servers
    )

    def run(number: int) -> list[tuple[float, int, int]]:
        rng = random.Random(f"{name}-{number}")
        turns, prompt = [], [rng.randrange(1000, 40_000) for _ in range(FIRST_TOKENS)]
        for turn in range(TURNS):
            time.sleep(rng.uniform(*TOOL_SECONDS))
            rollout = f"{number}" if way == "with" else f"{number}-{turn}"
            told = pool.generate(
                rollout,
                prompt,
                SamplingParams(temperature=1.0, max_tokens=1, seed=turn),
                budget_seconds=120,
                cache_salt=f"{way}-{name}",
            )
            turns.append((told.seconds, told.cached_tokens or 0, len(prompt)))
            new = [rng.randrange(1000, 40_000) for _ in range(TURN_TOKENS)]
            prompt = [*prompt, *told.token_ids, *new]
        return turns

    with ThreadPoolExecutor(AT_ONCE) as threads:
        return list(threads.map(run, range(ROLLOUTS)))


def _row(way: str, rollouts: list[list[tuple[float, int, int]]]) -> dict[str, Any]:
    turns = [turn for rollout in rollouts for turn in rollout]
    later = [turn for rollout in rollouts for turn in rollout[1:]]
    return {
        "way": way,
        "cached": sum(turn[1] for turn in turns) / sum(turn[2] for turn in turns),
        "seconds": [
            statistics.mean(rollout[number][0] for rollout in rollouts) for number in range(TURNS)
        ],
        "later_seconds": statistics.mean(turn[0] for turn in later),
    }
