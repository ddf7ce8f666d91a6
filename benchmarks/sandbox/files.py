"""Work on files inside a sandbox: our layer on disk, Apptainer's in memory and on disk."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial

from benchmarks.sandbox.forms import OURS, OVERLAY, UNPACKED, EngineForm
from benchmarks.sandbox.measures import Measure, Samples
from benchmarks.sandbox.stage import Stage
from benchmarks.sandbox.ways import WayBroken
from benchmarks.sandbox.ways.pipe import PipeWay

SECTION = "files"
_SOURCE = "/usr/lib/python3*"
_WORK = "/opt/bench-files"
JOBS = {
    "git: init, add, commit, status": (
        f"mkdir -p {_WORK}/git && cd {_WORK}/git && git init -q . && "
        f"cp -r {_SOURCE}/json {_SOURCE}/email . && git add -A && "
        "git -c user.name=b -c user.email=b@example.org commit -q -m x && git status && "
        f"cd / && rm -rf {_WORK}/git"
    ),
    "cp -r, rm -r": (
        f"mkdir -p {_WORK}/copy && cp -r {_SOURCE}/email {_SOURCE}/asyncio {_WORK}/copy && "
        f"rm -r {_WORK}/copy"
    ),
    "grep -r": f"grep -r 'def __init__' {_SOURCE}",
    "ls -lR": "ls -lR /usr/lib /etc",
}


def measure(stage: Stage) -> list[Measure]:
    """Time every job in all three, entered alike: only the files differ."""
    samples = Samples(SECTION, subjects=list(JOBS), ways=(UNPACKED, OVERLAY, OURS))
    with ExitStack() as stack:
        pids = {OURS: stack.enter_context(stage.sandbox()).pid}
        for label in (UNPACKED, OVERLAY):
            form = EngineForm(stage, label=label, image=stage.image, overlay=label == OVERLAY)
            running = form.start()
            stack.callback(form.clean, running)
            pids[label] = running.pid
        ways = {}
        for label, pid in pids.items():
            ways[label] = PipeWay(stage, stage.entry(pid))
            stack.callback(ways[label].close)
        turns = [(label, job) for label in ways for job in JOBS]
        for label, job in turns:  # the first run reads the image from disk
            _run(ways[label], job)
        for _, (label, job) in stage.rounds(SECTION, turns, 25):
            samples.time(job, label, partial(_run, ways[label], job))
    return samples.measures()


def _run(way: PipeWay, job: str) -> None:
    answer = way.run(f"( {JOBS[job]} ) </dev/null >/dev/null 2>&1; echo $?")
    if answer.strip() != b"0":
        raise WayBroken(f"{job} ended with {answer!r}")
