"""Commands on experiments: list, submit, watch, batches, cancel, export."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from itertools import islice
from typing import Any

from prorl_client import Client, Experiment, Group
from prorl_client.calls import new_key
from prorl_client.cli.lookup import find_experiment
from prorl_client.cli.output import Output, cell
from prorl_client.cli.task_files import read_entries
from prorl_client.errors import ConfigError, ServerError, ServiceUnreachable

GROUP_COLUMNS = ("id", "task_ref", "state", "samples", "done", "filter_rule")
BATCH_COLUMNS = ("id", "number", "state", "group_count", "policy_version", "lease_expires_at")
EXPERIMENT_COLUMNS = ("id", "name", "policy", "policy_version", "state", "feed", "created_at")


def list_experiments(client: Client, args: Namespace, out: Output) -> int:
    """Show the experiments."""
    found = islice(client.experiments(state=args.state), args.limit)
    out.rows((each.raw for each in found), EXPERIMENT_COLUMNS)
    return 0


def submit(client: Client, args: Namespace, out: Output) -> int:
    """Submit tasks, and wait for them if asked to."""
    entries: list[Any] = [*args.tasks]
    if args.file:
        entries += read_entries(args.file)
    if not entries:
        raise ConfigError("Name tasks by their references, or give --file.")
    experiment = find_experiment(client, args.experiment)
    groups = send(experiment, entries, args, out)
    out.say(f"Submitted {len(groups)} groups to {experiment.name}.")
    return show_groups(client, groups, args, out)


def send(experiment: Experiment, tasks: list[Any], args: Namespace, out: Output) -> list[Group]:
    """Submit tasks; when it breaks off, say how to go on without submitting any twice."""
    key = args.key or new_key()
    try:
        return experiment.submit(
            tasks,
            samples=args.samples,
            priority=args.priority,
            idempotency_key=key,
            progress=args.progress,
        )
    except (ServiceUnreachable, ServerError, KeyboardInterrupt):
        out.say(f"Run it again with --key {key}: what was accepted is not submitted twice.")
        raise


def show_groups(client: Client, groups: list[Group], args: Namespace, out: Output) -> int:
    """Show submitted groups, after their end where that is asked for."""
    if args.wait:
        groups = client.wait(groups, timeout=args.timeout, progress=args.progress)
    columns = GROUP_COLUMNS if args.wait else ("id", "task", "samples")
    out.rows((each.raw for each in groups), columns)
    return 0


def watch(client: Client, args: Namespace, out: Output) -> int:
    """Show how an experiment stands, then what happens to it."""
    experiment = find_experiment(client, args.experiment)
    _show(experiment, out)
    if args.once:
        return 0
    for event in experiment.events(args.after or "", kinds=args.kinds or ()):
        values = {"id": event.id, "kind": event.kind, **event.values}
        at = event.at.isoformat(timespec="seconds") if event.at else "-"
        words = "  ".join(f"{name}={cell(each)}" for name, each in event.values.items())
        out.value({**values, "at": at}, f"{at}  {event.kind:<18}  {words}".rstrip())
        if event.kind == "resync":
            _show(experiment.refresh(), out)
        if event.kind == "experiment.state" and event.values.get("state") == "stopped":
            return 0
    return 0


def batches(client: Client, args: Namespace, out: Output) -> int:
    """Show an experiment's batches, the newest first."""
    experiment = find_experiment(client, args.experiment)
    found = islice(experiment.leases(state=args.state), args.limit)
    out.rows((each.raw for each in found), BATCH_COLUMNS)
    return 0


def cancel(client: Client, args: Namespace, out: Output) -> int:
    """Cancel rollouts or groups, or stop experiments."""
    for each in args.ids:
        if args.what == "rollout":
            state = client.rollout(each).cancel().state
        elif args.what == "group":
            state = client.group(each).cancel().state
        else:
            cancelled = find_experiment(client, each).stop()
            state = f"stopped, {cancelled} rollouts cancelled"
        out.value({"id": each, "state": state}, f"{each}  {state}")
    return 0


def export(client: Client, args: Namespace, out: Output) -> int:
    """Write the trajectories of an experiment to a file."""
    experiment = find_experiment(client, args.experiment)
    outcome = None if args.outcome == "all" else args.outcome
    count = experiment.export(
        args.path, format=args.format, progress=args.progress, outcome=outcome
    )
    out.value({"path": args.path, "trajectories": count}, f"{count} trajectories in {args.path}")
    return 0


def _show(experiment: Experiment, out: Output) -> None:
    text = "\n".join(_lines(experiment))
    out.value({"kind": "status", **experiment.raw}, text)


def _lines(experiment: Experiment) -> Iterator[str]:
    yield f"{experiment.name} ({experiment.id}) is {experiment.state}, fed by {experiment.feed}."
    version = "unknown" if experiment.policy_version is None else experiment.policy_version
    yield f"Policy {experiment.policy} at version {version}."
    for what, counts in (("Rollouts", experiment.counts), ("Groups", experiment.coming)):
        if counts:
            yield f"{what}: " + ", ".join(f"{count} {state}" for state, count in counts.items())
    if experiment.feed_detail:
        yield f"Feed: {experiment.feed_detail}"
