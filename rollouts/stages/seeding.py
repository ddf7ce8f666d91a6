"""Seeds of samples: what a seed of the experiment gives each of its rollouts."""

import hashlib

from rollouts.models import Rollout
from rollouts.states import Purpose

SEED_LIMIT = 2**31  # what every inference server takes


def seed_of(rollout: Rollout, seed: int | None, *, offset: int = 0) -> int | None:
    """Return the seed of a request, None without one; `offset` tokens of its turn are there.

    The same seed again would draw the first tokens' random numbers for the next ones. It follows
    from the task's reference, the sample's number and, in training, the place in the feed: two
    groups of a batch must not draw the same numbers, nor two epochs of a task, and another run
    with the same seed has the same. The group and its task must have been read along.
    """
    if seed is None:
        return None
    parts: list[object] = [seed, rollout.group.task.ref, rollout.sample]
    if rollout.experiment.purpose != Purpose.EVALUATION and rollout.group.epoch is not None:
        parts += [rollout.group.epoch, rollout.group.position]
    digest = hashlib.sha256("\n".join(map(str, parts)).encode()).digest()
    return (int.from_bytes(digest[:8], "big") + offset) % SEED_LIMIT
