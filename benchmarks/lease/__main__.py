"""Compare a trainer's calls with a million consumed groups behind it and with a hundred."""

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
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prorl_site.stack.engines import Engines

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parents[1] / "results"
WARM_UP = 5

Samples = Mapping[str, Sequence[float]]


@dataclass
class Worker:
    """A process with a database of its own; it answers each line with one round."""

    process: subprocess.Popen[str]

    def answer(self) -> dict[str, float]:
        """Return the next answer. Raises RuntimeError when the process has ended."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the worker ended with {self.process.wait()}")
        found: dict[str, float] = json.loads(line)
        return found

    def round(self) -> dict[str, float]:
        """Time one round."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.answer()


def start(engines: Engines, groups: int) -> Worker:
    """Start a worker; it fills its database meanwhile."""
    environment = {
        **os.environ,
        "DATABASE_URL": engines.database_url(f"consumed_{groups}"),
        "BROKER_URL": engines.broker_url,
        "PRORL_SECRET_KEY": "for-measuring-only",
        "PRORL_VAR": str(engines.var_dir),
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.lease.worker", "--groups", str(groups)],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    return Worker(process)


def measure(sizes: Sequence[int], *, rounds: int, seed: int) -> dict[int, Samples]:
    """Return the samples of each call by number of groups; the order within a round is random."""
    order = random.Random(seed)
    found: dict[int, dict[str, list[float]]] = {size: defaultdict(list) for size in sizes}
    folder = Path(tempfile.mkdtemp(prefix="prorl-bench-lease-"))
    folder.chmod(0o755)
    engines = Engines(folder)
    workers: dict[int, Worker] = {}
    try:
        engines.start()
        for size in sizes:
            workers[size] = start(engines, size)
        for worker in workers.values():
            worker.answer()
        for number in range(WARM_UP + rounds):
            for size in order.sample(list(sizes), len(sizes)):
                for call, seconds in workers[size].round().items():
                    if number >= WARM_UP:
                        found[size][call].append(seconds)
    finally:
        for worker in workers.values():
            worker.process.kill()
            worker.process.wait()
        engines.stop()
        shutil.rmtree(folder, ignore_errors=True)
    return {size: dict(samples) for size, samples in found.items()}


def as_markdown(found: Mapping[int, Samples]) -> str:
    """Return the table: medians in milliseconds, and their ratio."""
    few, many = sorted(found)
    lines = [f"| Call | {few:,} consumed groups | {many:,} | Ratio |", "|---|---|---|---|"]
    for call in found[few]:
        small, large = (statistics.median(found[size][call]) for size in (few, many))
        lines.append(
            f"| {call} | {small * 1000:.2f} ms | {large * 1000:.2f} ms | {large / small:.2f} |"
        )
    rounds = len(next(iter(found[few].values())))
    return "\n".join([*lines, "", f"Medians of {rounds} interleaved rounds."]) + "\n"


def as_dict(found: Mapping[int, Samples]) -> dict[str, Any]:
    """Return every sample, in seconds, as JSON."""
    return {
        str(size): {call: [round(each, 6) for each in values] for call, values in samples.items()}
        for size, samples in found.items()
    }


def main(argv: Sequence[str]) -> int:
    """Measure, print and store; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lease")
    parser.add_argument("--groups", type=int, default=1_000_000)
    parser.add_argument("--few", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    found = measure([options.few, options.groups], rounds=options.rounds, seed=options.seed)
    text = as_markdown(found)
    print(text, flush=True)
    options.results.mkdir(parents=True, exist_ok=True)
    (options.results / "lease.md").write_text(text)
    (options.results / "lease.json").write_text(json.dumps(as_dict(found), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
