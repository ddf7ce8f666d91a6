"""Fill a fresh database with one leased batch; print where it is."""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from uuid import uuid4


def main(argv: list[str]) -> int:
    """Make the batch and its files; returns the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--trajectories", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    options = parser.parse_args(argv)

    import django

    django.setup()
    from django.core.management import call_command

    from rollouts.models import Batch, Trajectory
    from rollouts.services.trajectories import store_trajectory
    from tests import factories

    call_command("migrate", verbosity=0)
    owner = factories.make_user()
    _token, text = factories.make_token(owner)
    experiment = factories.make_experiment(owner=owner)
    draw = random.Random(0)
    groups, seconds = [], 0.0
    for first in range(0, options.trajectories, 8):
        size = min(8, options.trajectories - first)
        group = factories.make_group(
            experiment=experiment, state="ready", size=size, done_count=size
        )
        for _ in range(size):
            rollout = factories.make_scored_rollout(group=group, reward=draw.random())
            segment = _segment(draw, options.tokens)
            began = time.perf_counter()
            stored = store_trajectory(
                experiment_id=experiment.pk,
                rollout_id=rollout.pk,
                attempt_id=uuid4(),
                segments=[segment],
                messages=[{"role": "user", "content": "Say hello."}],
                tools=[],
            )
            seconds += time.perf_counter() - began
            Trajectory.objects.create(rollout=rollout, **vars(stored))
        groups.append(group)
    batch = factories.make_batch(groups=groups)
    Batch.objects.update(lease_expires_at="2100-01-01T00:00:00Z")
    told = {"batch": str(batch.pk), "token": text, "store_seconds": seconds / options.trajectories}
    print(json.dumps(told), flush=True)
    return 0


def _segment(draw: random.Random, tokens: int) -> dict[str, object]:
    """Return a segment of turns of 400 sampled tokens, each with 112 of a tool after it."""
    mask = ([1] * 400 + [0] * 112) * (tokens // 512 + 1)
    mask = mask[:tokens]
    turns = [
        {"start": start, "end": min(start + 400, tokens), "finish_reason": "stop", "reward": None}
        for start in range(0, tokens, 512)
    ]
    return {
        "id": 0,
        "parent": None,
        "fork_reason": None,
        "sampling": {"temperature": 1.0},
        "logprob_mode": "sampled",
        "turns": turns,
        "prompt_ids": [draw.randrange(150_000) for _ in range(512)],
        "response_ids": [draw.randrange(150_000) for _ in range(tokens)],
        "response_mask": mask,
        "response_logprobs": [-draw.expovariate(1.0) if sampled else 0.0 for sampled in mask],
        "policy_versions": [[3, tokens]],
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
