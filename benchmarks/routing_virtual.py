"""What it brings that a request whose prompt is where a slot is free passes others that wait.

The real router on a real Valkey, with the servers of `benchmarks.routing` in virtual time: nothing
sleeps, so that a busy machine changes nothing, and hundreds of runs can be compared.
"""

from __future__ import annotations

import heapq
import itertools
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis

from rollouts.inference.protocol import Server
from rollouts.inference.router import Assignment, Place, Router

SPEEDS = (1.0, 1.0, 0.5, 0.25)
TOKENS_PER_SECOND = 2000.0
BATCH = 4
TURNS, AT_ONCE = 4, 24
PLACES = (0, 4, 16)
# Rollouts, and what a prompt token costs of a sampled one.
CASES = ((64, 0.05), (64, 0.2))


@dataclass
class Request:
    """One turn of a rollout that waits or runs; times are virtual seconds."""

    rollout: int
    turn: int
    prompt: int
    asked_at: float
    place: Place


@dataclass
class World:
    """Play rollouts on servers whose slots the router gives away."""

    router: Router
    servers: list[Server]
    jobs: list[list[int]]
    prompt_cost: float
    now: float = 0.0
    cached: int = 0
    prompts: int = 0
    longest_wait: float = 0.0
    waiting: list[Request] = field(default_factory=list)
    _begun: int = 0
    _seen: dict[tuple[str, int], int] = field(default_factory=dict)
    _events: list[tuple[float, int, Request, Assignment]] = field(default_factory=list)
    _numbers: Any = field(default_factory=itertools.count)

    def play(self) -> None:
        """Run all rollouts to their end."""
        for _ in range(AT_ONCE):
            self._begin()
        while self._events:
            self.now, _, request, assignment = heapq.heappop(self._events)
            self.router.release(assignment)
            for each in list(self.waiting):
                self._look(each)
            tokens = self.jobs[request.rollout][request.turn]
            if request.turn + 1 < TURNS:
                prompt = request.prompt + tokens + 100
                self._ask(request.rollout, request.turn + 1, prompt)
            else:
                self._begin()

    def _begin(self) -> None:
        if self._begun < len(self.jobs):
            self._begun += 1
            self._ask(self._begun - 1, 0, 1000)

    def _ask(self, rollout: int, turn: int, prompt: int) -> None:
        tokens = self.jobs[rollout][turn]
        place = Place(str(rollout), tokens=tokens, prompt_tokens=prompt)
        request = Request(rollout, turn, prompt, self.now, place)
        self.waiting.append(request)
        self._look(request)

    def _look(self, request: Request) -> None:
        """Start a request if it has a slot by now."""
        request.place.look_again_at = 0.0
        found = self.router.wait(request.place, self.servers, lease_seconds=600, wait_seconds=0)
        if found is None:
            return
        self.waiting.remove(request)
        self.longest_wait = max(self.longest_wait, self.now - request.asked_at)
        tokens, where = self.jobs[request.rollout][request.turn], (found.server.id, request.rollout)
        cached = min(self._seen.get(where, 0), request.prompt)
        self._seen[where] = request.prompt + tokens
        self.cached, self.prompts = self.cached + cached, self.prompts + request.prompt
        work = tokens + (request.prompt - cached) * self.prompt_cost
        speed = SPEEDS[self.servers.index(found.server)]
        ends = self.now + work / (TOKENS_PER_SECOND * speed / BATCH)
        heapq.heappush(self._events, (ends, next(self._numbers), request, found))


def measure(client: redis.Redis, *, rounds: int, seed: int, cache: Path) -> list[dict[str, Any]]:
    """Return one row per case and number of places; `to_none` is a mean of paired runs."""
    del cache  # no model is asked
    rows = []
    for rollouts, prompt_cost in CASES:
        base: list[float] = []
        for places in PLACES:
            worlds = [
                _world(client, places, rollouts, prompt_cost, seed + each) for each in range(rounds)
            ]
            base = base or [world.now for world in worlds]
            ratios = [world.now / first for world, first in zip(worlds, base, strict=True)]
            rows.append(
                {
                    "rollouts": rollouts,
                    "prompt_cost": prompt_cost,
                    "places": places,
                    "to_none": statistics.mean(ratios),
                    "error": statistics.stdev(ratios) / rounds**0.5 if rounds > 1 else 0.0,
                    "cached": statistics.mean(each.cached / each.prompts for each in worlds),
                    "longest_wait": statistics.mean(each.longest_wait for each in worlds),
                }
            )
    return rows


def as_markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Return the table."""
    lines = [
        "| Rollouts | A prompt token costs | Places passed | Makespan to none "
        "| Prompt tokens cached | Longest wait |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = f"{row['to_none']:.3f} ± {row['error']:.3f} | {row['cached']:.0%}"
        case = f"{row['rollouts']} | {row['prompt_cost']:g} of a sampled one | {row['places']}"
        lines.append(f"| {case} | {cells} | {row['longest_wait']:.2f} s |")
    return "\n".join(lines) + "\n"


def _world(client: redis.Redis, places: int, rollouts: int, prompt_cost: float, seed: int) -> World:
    rng = random.Random(seed)
    jobs = [[rng.randint(40, 400) for _ in range(TURNS)] for _ in range(rollouts)]
    servers = [
        Server(f"s{number}", "http://virtual", "vllm", "m", BATCH, pool="p")
        for number in range(len(SPEEDS))
    ]
    name = f"virtual-{places}-{rollouts}-{prompt_cost}-{seed}"
    world = World(Router(client, name, overtake=places), servers, jobs, prompt_cost)
    world.play()
    return world
