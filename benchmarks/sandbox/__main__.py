"""Run the comparison: `python -m benchmarks.sandbox --help`."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from benchmarks.sandbox import bursts, commands, files, interpreters, lifecycle, machine, shells
from benchmarks.sandbox.forms import all_forms
from benchmarks.sandbox.goals import judge
from benchmarks.sandbox.measures import Measure
from benchmarks.sandbox.report import Report, show, store
from benchmarks.sandbox.stage import STOPPING, Stage, open_stage
from benchmarks.sandbox.ways import WayBroken
from sandboxes.runtime.exceptions import SandboxFault

SECTIONS = ("commands", "shells", "starts", "files", "python")
REPOSITORY = Path(__file__).resolve().parents[2]
WAYS = tuple(kind.key for kind in commands.KINDS)


def main(argv: Sequence[str]) -> int:
    """Measure, print and store; returns the exit code."""
    options = _parse(argv)
    for kind in STOPPING:  # SIGINT too: some shells have it ignored
        signal.signal(kind, signal.default_int_handler)
    if not (options.image / ".singularity.d").is_dir():
        print(f"{options.image} is no unpacked image: run scripts/build-base-image")
        return 2
    try:
        report = _measure(options)
    except KeyboardInterrupt:
        print("interrupted: nothing is stored, nothing runs on")
        return 130
    except (SandboxFault, WayBroken) as fault:
        print(f"{type(fault).__name__}: {fault}")
        return 1
    show(report, Console(width=None if sys.stdout.isatty() else 240))
    name = time.strftime("sandbox-%Y%m%d-%H%M%S", time.gmtime())
    for path in store(report, options.results, name):
        print(f"stored: {path}")
    return 0


def _measure(options: argparse.Namespace) -> Report:
    measures: list[Measure] = []
    with open_stage(
        image=options.image.absolute(),
        work=options.work,
        quick=options.quick,
        rounds=options.rounds,
        seed=options.seed,
    ) as stage:
        about = machine.describe(stage) | {"load_before": machine.load()}
        for name in options.only or SECTIONS:
            measures += _section(stage, name, options.ways)
        about["load_after"] = machine.load()
        notes = list(stage.notes)
    chosen = {
        "quick": options.quick,
        "rounds": options.rounds or "usual",
        "sections": list(options.only or SECTIONS),
        "ways": options.ways or "all",
        "seed": options.seed,
    }
    return Report(
        machine=about, options=chosen, measures=measures, verdicts=judge(measures), notes=notes
    )


def _section(stage: Stage, name: str, ways: list[str]) -> list[Measure]:
    match name:
        case "commands":
            return commands.measure(stage, ways)
        case "shells":
            return shells.measure(stage)
        case "starts":
            forms = all_forms(stage)
            return [*lifecycle.measure(stage, forms), *bursts.measure(stage, forms)]
        case "files":
            return files.measure(stage)
        case _:
            return interpreters.measure(stage)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sandbox", description=__doc__)
    image = os.environ.get("PRORL_BASE_IMAGE", str(REPOSITORY / "var" / "images" / "base"))
    add = parser.add_argument
    add("--quick", action="store_true", help="few rounds: shows that it works, proves no ratio")
    add("--only", action="append", choices=SECTIONS, help="one section; may be repeated")
    add("--ways", type=_ways, default=[], help=f"of `commands`, with commas: {', '.join(WAYS)}")
    add("--rounds", type=_positive, help="rounds of every section")
    add("--seed", type=int, default=time.time_ns() % 2**32, help="of the order within a round")
    add("--image", type=Path, default=Path(image), help="unpacked image")
    add("--work", type=Path, default=Path(tempfile.gettempdir()), help="where sandboxes lie")
    add("--results", type=Path, default=REPOSITORY / "benchmarks" / "results")
    return parser.parse_args(argv)


def _ways(text: str) -> list[str]:
    found = text.split(",")
    unknown = set(found) - set(WAYS)
    if unknown:
        raise argparse.ArgumentTypeError(f"no such way: {', '.join(sorted(unknown))}")
    return found


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return value


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
