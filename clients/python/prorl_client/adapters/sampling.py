"""Have tasks sampled that a trainer names, and wait for what they leave."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from prorl_client import AsyncExperiment, Experiment, InlineTask, ProrlError, Trajectory
from prorl_client.adapters.rows import samples_of
from prorl_client.submissions import Task, as_entry

logger = logging.getLogger("prorl_client")

TaskOf = Callable[[Mapping[str, Any]], Task]

KEYS = ("task_ref", "task_id", "task", "inline")
PLACES = ("extra_info", "metadata", "env_extras", "verifier_metadata", "extra_env_info")


class NoTask(ProrlError):
    """A trainer's row does not say which task it is."""


def task_of(row: Mapping[str, Any]) -> Task:
    """Return the task that a trainer's row names.

    `task_ref` (or `task`, a text) is a reference in the experiment's task sets, `task_id` a task's
    id, `inline` a whole task; in the row itself, or in `extra_info`, `metadata`, `env_extras`,
    `verifier_metadata` or `extra_env_info`. Raises NoTask.
    """
    for place in (row, *(row.get(name) for name in PLACES)):
        if not isinstance(place, Mapping):
            continue
        for key in KEYS:
            value = place.get(key)
            if key == "task_id" and value:
                return {"task": str(value)}
            if key == "inline" and isinstance(value, Mapping | InlineTask):
                return {"inline": value}
            if key in ("task_ref", "task") and isinstance(value, str) and value:
                return {"task_ref": value}
    raise NoTask(
        "The row names no task. Give it a column `task_ref`, `task_id` or `inline` (or put it in "
        "extra_info or metadata), or pass the adapter a function `task` of your own."
    )


def prompt_text(prompt: Any) -> str:
    """Return a prompt's text: of a conversation, that of its last user's message."""
    if isinstance(prompt, str):
        return prompt
    for message in reversed(prompt):
        if message["role"] == "user":
            content = message["content"]
            if isinstance(content, str):
                return content
            return "".join(part.get("text", "") for part in content)
    raise NoTask("The prompt has no user's message that could name a task.")


def runs_of(values: Sequence[Any]) -> list[tuple[Any, int]]:
    """Return neighbours that are equal, each with how many there are."""
    runs: list[tuple[Any, int]] = []
    for value in values:
        if runs and runs[-1][0] == value:
            runs[-1] = (value, runs[-1][1] + 1)
        else:
            runs.append((value, 1))
    return runs


def sample(
    experiment: Experiment, wanted: Sequence[tuple[Task, int]], *, timeout: float | None = None
) -> list[list[Trajectory]]:
    """Have each task sampled so many times; return their trajectories, in order.

    What is still open when the caller is interrupted or `timeout` ends is cancelled. The groups
    stay with the service, whatever the trainer makes of them. Raises WaitTimedOut.
    """
    groups = experiment.submit(_entries(wanted))
    try:
        done = experiment.client.wait(groups, timeout=timeout)
    except BaseException:
        for group in groups:
            try:
                group.cancel()
            except ProrlError as fault:  # finished meanwhile, or the service is away
                logger.info("group %s was not cancelled: %s", group.id, fault)
        raise
    return [
        samples_of(group.trajectories(), count)
        for group, (_task, count) in zip(done, wanted, strict=True)
    ]


async def sample_async(
    experiment: AsyncExperiment, wanted: Sequence[tuple[Task, int]], *, timeout: float | None = None
) -> list[list[Trajectory]]:
    """Do as `sample` does, beside others in one event loop."""
    groups = await experiment.submit(_entries(wanted))
    try:
        done = await experiment.client.wait(groups, timeout=timeout)
    except BaseException:
        faults = await asyncio.shield(
            asyncio.gather(*(group.cancel() for group in groups), return_exceptions=True)
        )
        for fault in faults:
            if isinstance(fault, BaseException):
                logger.info("a group was not cancelled: %s", fault)
        raise
    found = await asyncio.gather(*(group.trajectories() for group in done))
    return [samples_of(each, count) for each, (_task, count) in zip(found, wanted, strict=True)]


def _entries(wanted: Iterable[tuple[Task, int]]) -> list[dict[str, Any]]:
    return [{**as_entry(task, {}), "samples": count} for task, count in wanted]
