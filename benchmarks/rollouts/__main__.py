"""Measure many rollouts in one run worker: `python -m benchmarks.rollouts --help`."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.rollouts.line import open_line
from benchmarks.rollouts.measures import LONGEST_SECONDS, Pace, Usage, memory_of_waiting, pace
from prorl_site.stack.processes import ROOT
from prorl_site.stack.stack import StackError

RESULTS = Path(__file__).parent.parent / "results"
STEPS = (64, 256)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return what one stack with one run worker shows."""
    with open_line(
        rollouts=options.rollouts,
        runtime=options.runtime,
        turns=options.turns,
        tokens=options.tokens,
        latency=options.latency,
        events=options.events,
        image_root=options.images.absolute(),
    ) as line:
        steps = [*(each for each in STEPS if each < options.rollouts), options.rollouts]
        waiting, rollouts = memory_of_waiting(line, steps)
        load = os.getloadavg()[0]
        found = pace(line, rollouts, latency=options.latency, turns=options.turns)
        line.wait_done(rollouts, LONGEST_SECONDS)
        query = "SELECT outcome, count(*) FROM rollouts_rollout WHERE id = ANY(%s) GROUP BY 1"
        outcomes = dict(line.sql(query, rollouts))
    chosen = ("runtime", "rollouts", "turns", "tokens", "latency", "events")
    return {
        "options": {name: getattr(options, name) for name in chosen},
        "cores": len(os.sched_getaffinity(0)),
        "load_before": round(load, 2),
        "outcomes": outcomes,
        "waiting": [each.as_dict() for each in waiting],
        "memory_per_waiting_mib": _per_waiting(waiting),
        "pace": found.as_dict(),
    }


def _per_waiting(found: Sequence[Usage]) -> float:
    first, last = found[0], found[-1]
    return (last.private_mib - first.private_mib) / (last.waiting - first.waiting)


def as_markdown(found: dict[str, Any]) -> str:
    """Return the tables."""
    options, spread = found["options"], Pace(**found["pace"])
    lines = [
        f"# {options['rollouts']} rollouts of the {options['runtime']} runtime",
        "",
        *(f"- {name}: {value}" for name, value in options.items()),
        *(f"- {name}: {found[name]}" for name in ("cores", "load_before", "outcomes")),
        "",
        "| Waiting | Private MiB | Threads | Files | To the broker | Database, all processes |",
        "|---|---|---|---|---|---|",
    ]
    for each in (Usage(**row) for row in found["waiting"]):
        cells = (f"{each.private_mib:.1f}", each.threads, each.files, each.store_connections)
        row = " | ".join(map(str, (each.waiting, *cells, each.database_connections)))
        lines.append(f"| {row} |")
    figures = {
        "memory of one that waits": f"{found['memory_per_waiting_mib']:.3f} MiB",
        "the worker's processor time of a turn": f"{spread.worker_cpu_per_turn * 1000:.1f} ms",
        "its helpers'": f"{spread.helpers_cpu_per_turn * 1000:.1f} ms",
        "cores that the worker used": f"{spread.worker_cores:.2f}",
        "throughput to the ideal": f"{spread.to_ideal:.0%}",
        "a turn: median, 95th percentile, longest": (
            f"{spread.turn_median:.2f}, {spread.turn_p95:.2f}, {spread.turn_longest:.2f} s"
        ),
        "slowest rollout to the median": f"{spread.rollout_longest / spread.rollout_median:.2f}",
    }
    lines += ["", "| Figure | Here |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in figures.items()]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str]) -> int:
    """Measure, print and store; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rollouts")
    parser.add_argument("--runtime", choices=["fake", "local", "apptainer"], default="fake")
    parser.add_argument("--rollouts", type=int, default=512, help="all wait at once")
    parser.add_argument("--turns", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64, help="of a turn")
    parser.add_argument("--latency", type=float, default=2.0, help="seconds of an answer")
    parser.add_argument("--events", type=int, default=8, help="of a stream; 0: answers are whole")
    parser.add_argument("--images", type=Path, default=ROOT / "var" / "images")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    try:
        found = measure(options)
    except KeyboardInterrupt:
        print("interrupted: nothing is stored, nothing runs on")
        return 130
    except StackError as error:
        print(error)
        return 1
    print(as_markdown(found))
    store(options.results, found)
    return 0


def store(results: Path, found: dict[str, Any]) -> None:
    """Write what was found, beside what is there of other runtimes."""
    results.mkdir(parents=True, exist_ok=True)
    file = results / "rollouts.json"
    known = json.loads(file.read_text()) if file.is_file() else {}
    known[found["options"]["runtime"]] = found
    file.write_text(json.dumps(known, indent=1) + "\n")
    (results / "rollouts.md").write_text("\n".join(map(as_markdown, known.values())))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
