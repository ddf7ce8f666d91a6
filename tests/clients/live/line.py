"""What the assembly line does to rollouts, without its workers: they end with a reward."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from django.db import connection

from rollouts.models import Rollout
from rollouts.services.end import end_rollout
from tests import factories

PAUSE_SECONDS = 0.05


@contextmanager
def playing() -> Iterator[None]:
    """End every rollout that comes, 1 and 0 in turns, from a thread, until the block ends."""
    over = threading.Event()
    faults: list[BaseException] = []

    def play() -> None:
        try:
            while not over.wait(PAUSE_SECONDS):
                for rollout in list(Rollout.objects.unfinished().order_by("sequence", "sample")):
                    end(rollout)
        except BaseException as fault:
            faults.append(fault)
        finally:
            connection.close()

    thread = threading.Thread(target=play, name="line")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(60)
    assert faults == []


def end(rollout: Rollout) -> None:
    """Store a trajectory and score the rollout, if nobody ended it meanwhile."""
    factories.make_trajectory(rollout=rollout)
    reward = float(rollout.sample % 2 == 0)
    end_rollout(rollout_id=rollout.pk, outcome="scored", reward=reward, rewards={"exact": reward})
