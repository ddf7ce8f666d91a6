"""Compare the formats of a large batch: `python -m benchmarks.payloads --help`."""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import psutil
import pyarrow as pa

from benchmarks.payloads.measures import MIB, Transfer, cat, fetch
from prorl_site.stack.engines import Engines, free_port

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parents[1] / "results"
HOST = "127.0.0.1"
ARROW = "application/vnd.apache.arrow.stream"
WAYS = {
    "JSON, parsed and written again": ("before/json/{batch}/", "*/*"),
    "the same with msgspec": ("before/msgspec/{batch}/", "*/*"),
    "JSON": ("api/v1/batches/{batch}/", "application/json"),
    "NDJSON": ("api/v1/batches/{batch}/", "application/x-ndjson"),
    "Arrow": ("api/v1/batches/{batch}/", ARROW),
}
SLOW = "JSON, parsed and written again"


def environment(engines: Engines) -> dict[str, str]:
    """Return what the service's processes need to know."""
    return {
        **os.environ,
        "DATABASE_URL": engines.database_url("payloads"),
        "BROKER_URL": engines.broker_url,
        "PRORL_SECRET_KEY": "for-measuring-only",
        "PRORL_VAR": str(engines.var_dir),
        "DJANGO_SETTINGS_MODULE": "benchmarks.payloads.settings",
    }


@contextmanager
def web(engines: Engines) -> Iterator[tuple[int, psutil.Process]]:
    """Run the web process as the Procfile does; give its port and itself."""
    port = free_port()
    command = ["uvicorn", "prorl_site.asgi:application", "--host", HOST, "--port", str(port)]
    process = subprocess.Popen(
        [sys.executable, "-m", *command, "--no-access-log", "--log-level", "warning"],
        cwd=ROOT,
        env=environment(engines),
    )
    try:
        for _ in range(600):
            try:
                httpx.get(f"http://{HOST}:{port}/healthz", timeout=5).raise_for_status()
                break
            except httpx.HTTPError:
                if process.poll() is not None:
                    raise RuntimeError("the web process ended") from None
                time.sleep(0.1)
        yield port, psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(30)


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return the transfers of each way, and the seconds of the kernel's own."""
    engines = Engines(folder)
    try:
        engines.start()
        sizes = ["--trajectories", str(options.trajectories), "--tokens", str(options.tokens)]
        filled = subprocess.run(
            [sys.executable, "-m", "benchmarks.payloads.fill", *sizes],
            cwd=ROOT,
            env=environment(engines),
            stdout=subprocess.PIPE,
            check=True,
        )
        told = json.loads(filled.stdout)
        with web(engines) as (port, process):
            return {**told, **_transfers(options, folder, told, port, process)}
    finally:
        engines.stop()


def _transfers(
    options: argparse.Namespace,
    folder: Path,
    told: Mapping[str, str],
    port: int,
    process: psutil.Process,
) -> dict[str, Any]:
    requests = {
        way: "\r\n".join(
            [
                f"GET /{path.format(batch=told['batch'])} HTTP/1.1",
                f"Host: {HOST}",
                f"Authorization: Bearer {told['token']}",
                f"Accept: {accept}",
                "Connection: close\r\n\r\n",
            ]
        ).encode()
        for way, (path, accept) in WAYS.items()
    }
    _check(options, port, told)
    found: dict[str, list[Transfer]] = defaultdict(list)
    kernel: dict[str, list[float]] = defaultdict(list)
    stored = folder / "trajectories"
    files = {kind: sorted(stored.rglob(f"*.{kind}")) for kind in ("json", "arrow")}
    order = random.Random(options.seed)
    for number in range(options.rounds):
        for way in order.sample(list(WAYS), len(WAYS)):
            if way == SLOW and number >= options.slow_rounds:
                continue
            found[way].append(fetch((HOST, port), requests[way], process))
        for kind, paths in files.items():
            kernel[kind].append(cat(paths))
    sizes = {kind: sum(path.stat().st_size for path in paths) for kind, paths in files.items()}
    return {
        "ways": {way: [asdict(each) for each in found[way]] for way in WAYS},
        "cat": {kind: {"bytes": sizes[kind], "seconds": kernel[kind]} for kind in files},
        "idle_mib": process.memory_info().rss / MIB,
    }


def _check(options: argparse.Namespace, port: int, told: Mapping[str, str]) -> None:
    """Read each way's answer once as a trainer would. Raises RuntimeError when it is not whole."""
    sent = {"Authorization": f"Bearer {told['token']}"}
    for way, (path, accept) in WAYS.items():
        url = f"http://{HOST}:{port}/{path.format(batch=told['batch'])}"
        body = httpx.get(url, headers={**sent, "Accept": accept}, timeout=600).content
        if accept == ARROW:
            count = pa.ipc.open_stream(body).read_all().num_rows
        else:
            count = body.count(b'"response_ids":')
        if count != options.trajectories:
            raise RuntimeError(f"{way}: {count} of {options.trajectories} trajectories")


def as_markdown(found: Mapping[str, Any], options: argparse.Namespace) -> str:
    """Return the table: medians."""
    lines = [
        "| Way | MB | Seconds | MB/s | To `cat` | First byte | Processor | Memory |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for way, samples in found["ways"].items():
        size = samples[0]["bytes"]
        middle = {key: statistics.median(each[key] for each in samples) for key in samples[0]}
        same = found["cat"]["arrow" if way == "Arrow" else "json"]
        ratio = middle["seconds"] / statistics.median(same["seconds"])
        lines.append(
            f"| {way} | {size / 1e6:.0f} | {middle['seconds']:.2f} | "
            f"{size / middle['seconds'] / 1e6:.0f} | {ratio:.1f} | "
            f"{middle['first_byte_seconds']:.2f} s | {middle['cpu_seconds']:.2f} s | "
            f"+{max(each['peak_mib'] for each in samples):.0f} MiB |"
        )
    for kind, each in found["cat"].items():
        seconds = statistics.median(each["seconds"])
        rate = each["bytes"] / seconds / 1e6
        lines.append(
            f"| `cat` of the {kind} files | {each['bytes'] / 1e6:.0f} | {seconds:.2f} | "
            f"{rate:.0f} | 1.0 | | | |"
        )
    rounds = [len(samples) for samples in found["ways"].values()]
    lines += [
        "",
        f"{options.trajectories} trajectories of {options.tokens} tokens; medians of "
        f"{min(rounds)} to {max(rounds)} interleaved rounds, memory is the largest; "
        f"{len(os.sched_getaffinity(0))} cores, load {found['load']:.1f}. Storing one in both "
        f"forms took {found['store_seconds'] * 1000:.0f} ms.",
    ]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str]) -> int:
    """Measure, print and store; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.payloads")
    parser.add_argument("--trajectories", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--slow-rounds", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    folder = Path(tempfile.mkdtemp(prefix="prorl-bench-payloads-"))
    folder.chmod(0o755)
    load = os.getloadavg()[0]
    try:
        found = {**measure(options, folder), "load": load}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    del found["token"]
    text = as_markdown(found, options)
    print(text, flush=True)
    options.results.mkdir(parents=True, exist_ok=True)
    (options.results / "payloads.md").write_text(text)
    (options.results / "payloads.json").write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
