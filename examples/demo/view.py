"""What the demo shows: live bars, the batch as a table, one readable trajectory."""

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

STATES = ("queued", "init", "run", "eval", "done")
COLOURS = {"queued": "white", "init": "yellow", "run": "cyan", "eval": "magenta", "done": "green"}
JSON = dict[str, Any]


def follow(console: Console, fetch: Callable[[], list[JSON]], check: Callable[[], None]) -> float:
    """Show rollouts per state until all are done; return tokens per second over the whole time."""
    began = time.monotonic()
    with Progress(
        TextColumn("{task.description:>7}"),
        BarColumn(bar_width=40),
        TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
        console=console,
    ) as progress:
        rows = fetch()
        bars = {
            state: progress.add_task(f"[{COLOURS[state]}]{state}", total=len(rows), note="")
            for state in STATES
        }
        while True:
            counts = Counter(row["state"] for row in rows)
            tokens = sum(row["sampled_tokens"] for row in rows)
            rate = tokens / max(time.monotonic() - began, 0.001)
            for state, bar in bars.items():
                note = f"{rate:6.1f} sampled tokens/s" if state == "run" else ""
                progress.update(bar, completed=counts[state], note=note)
            if counts["done"] == len(rows):
                return rate
            check()
            time.sleep(0.4)
            rows = fetch()


def batch_table(console: Console, trajectories: list[JSON]) -> None:
    """Print a leased batch: task, reward, turns, tokens, seconds in each stage."""
    table = Table(title="Leased batch (stages and queues in seconds)", box=box.SIMPLE_HEAD)
    table.add_column("task", no_wrap=True)
    table.add_column("#", justify="right")
    table.add_column("outcome", no_wrap=True)
    table.add_column("stop", no_wrap=True)
    for name in ("reward", "turns", "tokens", "init", "run", "eval", "queues"):
        table.add_column(name, justify="right", no_wrap=True)
    for each in trajectories:
        timings = each["timings"]
        sampled = sum(sum(segment["response_mask"]) for segment in each["segments"])
        waited = sum(seconds for name, seconds in timings.items() if name.startswith("queue_"))
        reward = each["reward"]
        table.add_row(
            each["task_ref"],
            str(each["sample"]),
            each["outcome"],
            each["stop_reason"] or "",
            "null" if reward is None else f"{reward:.2f}",
            str(each["turns"]),
            str(sampled),
            *(f"{timings.get(stage, 0):.2f}" for stage in ("init", "run", "eval")),
            f"{waited:.2f}",
        )
    console.print(table)


def readable(trajectory: JSON) -> str:
    """Return one trajectory as text for people."""
    lines = [
        f"task        {trajectory['task_ref']}  (sample {trajectory['sample']})",
        f"environment {trajectory['environment']}",
        f"outcome     {trajectory['outcome']}, reward {trajectory['reward']}, "
        f"stopped: {trajectory['stop_reason']}",
        f"timings     {trajectory['timings']}",
        "",
    ]
    for message in trajectory["messages"]:
        lines += [f"--- {message['role']} ---", str(message["content"]), ""]
    for segment in trajectory["segments"]:
        mask = segment["response_mask"]
        lines += [
            f"segment {segment['id']}: {len(segment['prompt_ids'])} prompt tokens, "
            f"{sum(mask)} sampled, {len(mask) - sum(mask)} of the environment, "
            f"policy versions {segment['policy_versions']}",
            f"  first sampled ids       {_sampled(segment, 'response_ids')}",
            f"  their log-probabilities {_sampled(segment, 'response_logprobs')}",
        ]
    return "\n".join(lines) + "\n"


def _sampled(segment: JSON, name: str) -> list[Any]:
    values = zip(segment[name], segment["response_mask"], strict=True)
    kept = [value for value, sampled in values if sampled][:8]
    return [round(value, 3) if isinstance(value, float) else value for value in kept]
