"""Many sandboxes started at once: how long each and all of them take, memory, failures."""

from __future__ import annotations

import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

from benchmarks.sandbox.forms import (
    OURS,
    OURS_AHEAD,
    UNPACKED,
    Form,
    Running,
    await_end,
    proportional_mib,
)
from benchmarks.sandbox.measures import Measure, Samples
from benchmarks.sandbox.stage import Stage
from benchmarks.sandbox.ways import WayBroken
from sandboxes.runtime.exceptions import SandboxFault

SECTION = "bursts"
FEW, MANY = 16, 64
FAILED = f"{MANY} at once, failed"


def measure(stage: Stage, forms: list[Form]) -> list[Measure]:
    """Start 16 of each form at once, warm and cold, and 64 of the two unpacked forms."""
    samples = Samples(SECTION, subjects=_subjects(), ways=[form.label for form in forms])
    turns = [(form, FEW, cold) for form in forms for cold in (False, True)]
    turns += [(form, MANY, False) for form in forms if form.label in (OURS, UNPACKED)]
    turns = [turn for turn in turns if not (turn[2] and turn[0].label == OURS_AHEAD)]
    with ThreadPoolExecutor(MANY) as pool:
        list(pool.map(abs, range(MANY)))  # its threads start before anything is timed
        for _, (form, count, cold) in stage.rounds("many starts at once", turns, 4, quick=1):
            _burst(stage, pool, samples, form, count, cold)
    return samples.measures()


def _subjects() -> list[str]:
    return [
        f"{count} at once{state}, {what}"
        for count in (FEW, MANY)
        for state in ("", ", cold")
        for what in ("all", "each", "PSS each", "failed")
    ]


def _burst(
    stage: Stage, pool: ThreadPoolExecutor, samples: Samples, form: Form, count: int, cold: bool
) -> None:
    form.prepare(count)
    if cold:
        form.evict()
    subject = f"{count} at once{', cold' if cold else ''}"
    began = time.perf_counter()
    results = list(pool.map(lambda _: _start(form), range(count)))
    samples.add(f"{subject}, all", form.label, 1000 * (time.perf_counter() - began))
    started = [(running, taken) for running, taken, _ in results if running is not None]
    members = [member for running, _ in started for member in running.members()]
    for _, taken in started:
        samples.add(f"{subject}, each", form.label, taken)
    if started and not cold:
        memory = proportional_mib(members)
        samples.add(f"{count} at once, PSS each", form.label, memory / len(started), "MiB")
    faults = [fault for *_, fault in results if fault]
    samples.add(f"{subject}, failed", form.label, len(faults), "failed")
    if faults:
        stage.note(f"{form.label}, {subject}: {len(faults)} failed, the first: {faults[0][:300]}")
    list(pool.map(lambda item: form.clean(item[0]), started))
    await_end(members)


def _start(form: Form) -> tuple[Running | None, float, str]:
    """Return what was started, the milliseconds it took, and why it failed."""
    began = time.perf_counter()
    try:
        running = form.start()
    except (SandboxFault, WayBroken, subprocess.SubprocessError, OSError) as fault:
        return None, 0.0, f"{type(fault).__name__}: {fault}"
    return running, 1000 * (time.perf_counter() - began), ""
