"""Commands on servers, tasks and trajectories."""

from __future__ import annotations

import json
from argparse import Namespace
from itertools import islice
from pathlib import Path
from typing import Any

from prorl_client import Client, Trajectory
from prorl_client.cli.experiments import send, show_groups
from prorl_client.cli.lookup import find_experiment, find_task_set
from prorl_client.cli.output import Output, block
from prorl_client.cli.task_files import read_tasks
from prorl_client.errors import ConfigError
from prorl_client.progress import Progress

SERVER_COLUMNS = ("id", "policy", "url", "kind", "state", "healthy", "max_in_flight", "detail")
SET_COLUMNS = ("id", "name", "task_count", "description")
COUNTS = ("created", "changed", "unchanged", "rejected")
TASK_COLUMNS = ("id", "ref", "environment", "instruction")


def servers_list(client: Client, args: Namespace, out: Output) -> int:
    """Show the inference servers."""
    out.rows((each.raw for each in client.servers(policy=args.policy)), SERVER_COLUMNS)
    return 0


def servers_add(client: Client, args: Namespace, out: Output) -> int:
    """Register an inference server."""
    settings: dict[str, Any] = {"kind": args.kind, "max_in_flight": args.max_in_flight}
    given = {name: each for name, each in settings.items() if each is not None}
    server = client.add_server(args.policy, args.server_url, **given)
    out.value(dict(server.raw), f"{server.id}  {server.url} serves {server.policy}")
    return 0


def servers_remove(client: Client, args: Namespace, out: Output) -> int:
    """Send servers no new work."""
    for each in args.ids:
        client.remove_server(each)
        out.value({"id": each, "removed": True}, f"{each}  removed")
    return 0


def servers_clear(client: Client, args: Namespace, out: Output) -> int:
    """Remove every server of a policy, or of all policies."""
    if args.policy is None and not args.all:
        raise ConfigError("Give --policy, or --all for the servers of every policy of yours.")
    removed = client.clear_servers(args.policy)
    out.value({"removed": removed}, f"{removed} servers removed")
    return 0


def tasks_list(client: Client, args: Namespace, out: Output) -> int:
    """Show the task sets, or the tasks of one."""
    if args.task_set is None:
        out.rows((each.raw for each in islice(client.task_sets(), args.limit)), SET_COLUMNS)
        return 0
    found = client.tasks(find_task_set(client, args.task_set).id)
    out.rows((each.raw for each in islice(found, args.limit)), TASK_COLUMNS)
    return 0


def tasks_import(client: Client, args: Namespace, out: Output) -> int:
    """Have a file or folder imported, or send its tasks along with groups of an experiment."""
    if (args.set_name is None) == (args.experiment is None):
        raise ConfigError("Give --set to import into a task set, or --experiment to sample them.")
    if args.set_name is not None:
        return _import_set(client, args, out)
    tasks = list(read_tasks(args.file, environment=args.environment))
    if not tasks:
        raise ConfigError(f"{args.file} holds no task.")
    experiment = find_experiment(client, args.experiment)
    groups = send(experiment, tasks, args, out)
    out.say(
        f"Sent {len(tasks)} tasks to {experiment.name} as groups that are sampled now; they are in "
        "its own task set. A task set that experiments share is an operator's to make: "
        "`prorl tasks import --set`."
    )
    return show_groups(client, groups, args, out)


def _import_set(client: Client, args: Namespace, out: Output) -> int:
    began = client.import_tasks(
        args.file,
        args.set_name,
        format=args.format,
        environment=args.environment,
        options=_options(args.options),
    )
    with Progress(f"import {began.name}", 1000, shown=args.progress) as bar:
        done = began.wait(args.timeout, seen=lambda now: bar.set(int(1000 * (now.progress or 0))))
    counts = ", ".join(f"{getattr(done, name)} {name}" for name in COUNTS)
    out.value(dict(done.raw), f"{done.id}  {done.state}  {done.format}: {counts}")
    for row in done.rejected_rows():
        out.say(f"refused {row.place}: {row.reason}")
    if done.error:
        out.say(f"prorl: {done.error}")
    return 0 if done.state == "done" and not done.rejected else 1


def _options(text: str | None) -> Any:
    if text is None:
        return None
    given = text if text.lstrip().startswith("{") else Path(text).read_text(encoding="utf-8")
    try:
        return json.loads(given)
    except ValueError as fault:
        raise ConfigError(f"--options is not JSON: {fault}") from fault


def trajectory_show(client: Client, args: Namespace, out: Output) -> int:
    """Show what a rollout left."""
    trajectory = client.rollout(args.rollout).trajectory()
    found = trajectory.as_dict()
    if not args.tokens:
        found["segments"] = [_summary(each) for each in found["segments"]]
    out.value(found, _text(trajectory, found["segments"] if args.tokens else []))
    return 0


def _summary(segment: dict[str, Any]) -> dict[str, Any]:
    """Return a segment with counts in place of its tokens."""
    arrays = ("prompt_ids", "response_ids", "response_mask", "response_logprobs")
    kept = {name: each for name, each in segment.items() if name not in arrays}
    return {
        **kept,
        "prompt_tokens": len(segment["prompt_ids"]),
        "response_tokens": len(segment["response_ids"]),
        "sampled_tokens": sum(segment["response_mask"]),
    }


def _text(trajectory: Trajectory, segments: list[dict[str, Any]]) -> str:
    lines = [
        f"rollout   {trajectory.rollout}",
        f"task      {trajectory.task_ref} (sample {trajectory.sample}, {trajectory.environment})",
        f"outcome   {trajectory.outcome}, {trajectory.stop_reason or trajectory.failure_code}",
        f"reward    {trajectory.reward}  {dict(trajectory.rewards)}",
        f"policy    version {trajectory.first_version} to {trajectory.last_version}",
        f"tokens    {trajectory.sampled_tokens} sampled in {len(trajectory.segments)} segments, "
        f"{trajectory.turns} turns",
    ]
    if trajectory.error is not None:
        lines.append(f"error     {dict(trajectory.error)}")
    for message in trajectory.messages or ():
        lines += ["", f"[{message.get('role')}]", _said(message)]
    for segment in segments:
        lines += ["", f"segment {segment['id']}"]
        lines += [f"{name}: {each}" for name, each in segment.items() if name != "id"]
    return block("\n".join(lines))


def _said(message: Any) -> str:
    content = message.get("content")
    parts = [content if isinstance(content, str) else "" if content is None else str(content)]
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        parts.append(f"-> {function.get('name')}({function.get('arguments')})")
    return "\n".join(part for part in parts if part)
