"""Start, memory and end of one sandbox at a time, in every form."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from benchmarks.sandbox.forms import (
    OURS_AHEAD,
    UNPACKED,
    EngineForm,
    Form,
    OurForm,
    await_end,
    proportional_mib,
)
from benchmarks.sandbox.measures import Measure, Samples
from benchmarks.sandbox.stage import Stage
from sandboxes.runtime.processes import ProcessStat

SECTION, STOPS = "starts", "stops"
ALONE_WARM, ALONE_COLD, MEMORY = "warm page cache", "cold page cache", "PSS"
STOP = "end"
STOP_OURS, KILL_OURS = "ours: stop, layer thrown away", "ours: bare SIGKILL of its pid"
STOP_ENGINE = "unpacked: apptainer instance stop"
KILL_ENGINE = "unpacked: bare SIGKILL of its pid"


def measure(stage: Stage, forms: list[Form]) -> list[Measure]:
    """Start and end one sandbox after the other."""
    stage.note(
        "Cold page cache: the file pages of the image were dropped by posix_fadvise before the "
        "start; Apptainer's own binaries, inodes and directory entries stayed cached."
    )
    stage.note("An end is timed until none of the sandbox's processes runs, whoever ends them.")
    starts = Samples(
        SECTION,
        subjects=(ALONE_WARM, ALONE_COLD, MEMORY),
        ways=[form.label for form in forms],
    )
    stops = Samples(STOPS, ways=(KILL_OURS, STOP_OURS, KILL_ENGINE, STOP_ENGINE))
    turns = [(form, cold) for form in forms for cold in (False, True)]
    turns = [(form, cold) for form, cold in turns if not (cold and form.label == OURS_AHEAD)]
    for number, (form, cold) in stage.rounds("starts and stops, one at a time", turns, 12):
        form.prepare(1)
        if cold:
            form.evict()
        running = starts.time(ALONE_COLD if cold else ALONE_WARM, form.label, form.start)
        members = running.members()
        starts.add(MEMORY, form.label, proportional_mib(members), "MiB")
        gently = (number + cold) % 2 == 0
        if isinstance(form, OurForm):
            if gently:
                stops.time(STOP, STOP_OURS, partial(_end, partial(form.stop, running), members))
            else:
                stops.time(STOP, KILL_OURS, partial(_end, running.kill, members))
        elif isinstance(form, EngineForm) and form.label == UNPACKED:
            if gently:
                stops.time(STOP, STOP_ENGINE, partial(_end, partial(form.stop, running), members))
            else:
                stops.time(STOP, KILL_ENGINE, partial(_end, running.kill, members))
        form.clean(running)
        await_end(members)
    return [*starts.measures(), *stops.measures()]


def _end(order: Callable[[], None], members: list[ProcessStat]) -> None:
    """Order a sandbox's end and wait until none of its processes runs, whoever ends them."""
    order()
    await_end(members)
