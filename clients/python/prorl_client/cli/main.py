"""What a trainer and its people do at a terminal.

Exit status: 0 done; 1 refused; 2 wrong use or configuration; 3 not allowed; 4 not found; 5 the
thing's state does not allow it; 6 the service failed or is not reached; 7 a wait ended; 130
interrupted.
"""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from pathlib import Path
from typing import Any

from prorl_client import Client, RetryPolicy
from prorl_client.cli import experiments, resources
from prorl_client.cli.output import Output
from prorl_client.errors import (
    AuthError,
    ConfigError,
    Conflict,
    MissingExtra,
    NotFound,
    NothingLeft,
    ProblemError,
    ProrlError,
    ServerError,
    ServiceUnreachable,
    WaitTimedOut,
)
from prorl_client.version import __version__

EXITS: tuple[tuple[type[Exception], int], ...] = (
    (ConfigError, 2),
    (MissingExtra, 2),
    (AuthError, 3),
    (NotFound, 4),
    (Conflict, 5),
    (ServerError, 6),
    (ServiceUnreachable, 6),
    (WaitTimedOut, 7),
    (NothingLeft, 7),
    (ProblemError, 1),
    (ProrlError, 1),
)


def main(argv: list[str] | None = None) -> int:
    """Run a command and return the exit status."""
    args = make_parser().parse_args(argv)
    out = Output(as_json=args.json)
    args.progress = sys.stderr.isatty() and not args.json
    try:
        with _client(args) as client:
            status: int = args.run(client, args, out)
            return status
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read us, such as `head`, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ProrlError, ValueError, OSError) as fault:
        out.say(f"prorl: {fault}")
        return next((status for kind, status in EXITS if isinstance(fault, kind)), 2)


def make_parser() -> ArgumentParser:
    """Return the parser of every command."""
    parser = ArgumentParser(
        prog="prorl", description=__doc__, formatter_class=RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=__version__)
    parser.add_argument("--url", help="the service's address; else PRORL_URL or the file")
    parser.add_argument("--token", help="seen by others in the process list: prefer the next")
    parser.add_argument("--token-file", type=Path, help="a file that holds the token alone")
    parser.add_argument("--profile", help="a section of the configuration file")
    parser.add_argument("--json", action="store_true", help="print JSON, an object a line")
    parser.add_argument(
        "--insist", type=float, default=20.0, help="seconds to try again after faults (%(default)g)"
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _experiment_commands(commands)
    _server_commands(commands)
    _task_commands(commands)
    return parser


def _client(args: Namespace) -> Client:
    token = args.token
    if args.token_file is not None:
        token = args.token_file.read_text(encoding="utf-8").strip()
    retries = RetryPolicy(total_seconds=args.insist)
    return Client(args.url, token, profile=args.profile, retries=retries)


def _experiment_commands(commands: Any) -> None:
    found = commands.add_parser("experiments", help="list experiments")
    found.add_argument("--state", choices=["active", "paused", "stopped"])
    _limited(found, experiments.list_experiments)

    submit = commands.add_parser("submit", help="have tasks sampled")
    submit.add_argument("experiment", help="name or id")
    submit.add_argument("tasks", nargs="*", metavar="REF", help="references of tasks")
    submit.add_argument("--file", help="JSON a line: references or the API's entries; - is stdin")
    _submitting(submit, experiments.submit)

    watch = commands.add_parser("watch", help="follow what happens to an experiment")
    watch.add_argument("experiment", help="name or id")
    watch.add_argument("--once", action="store_true", help="show how it stands and end")
    watch.add_argument("--after", metavar="ID", help="begin after this event")
    watch.add_argument("--kinds", nargs="+", metavar="KIND", help="such as group.ready")
    watch.set_defaults(run=experiments.watch)

    batches = commands.add_parser("batches", help="list an experiment's batches")
    batches.add_argument("experiment", help="name or id")
    batches.add_argument("--state", help="such as leased or acknowledged")
    _limited(batches, experiments.batches)

    cancel = commands.add_parser("cancel", help="cancel rollouts or groups, or stop experiments")
    cancel.add_argument("what", choices=["rollout", "group", "experiment"])
    cancel.add_argument("ids", nargs="+", metavar="ID")
    cancel.set_defaults(run=experiments.cancel)

    export = commands.add_parser("export", help="write trajectories to a file")
    export.add_argument("experiment", help="name or id")
    export.add_argument("path", help="its ending says the format: .jsonl, .parquet, none: ATIF")
    export.add_argument("--format", choices=["jsonl", "parquet", "atif"])
    export.add_argument("--outcome", default="scored", help="or all (%(default)s)")
    export.set_defaults(run=experiments.export)


def _server_commands(commands: Any) -> None:
    parser = commands.add_parser("servers", help="inference servers")
    parser.set_defaults(run=resources.servers_list, policy=None)
    below = parser.add_subparsers(metavar="COMMAND")
    found = below.add_parser("list", help="show them (also without a command)")
    found.add_argument("--policy", help="name")
    found.set_defaults(run=resources.servers_list)
    add = below.add_parser("add", help="register one")
    add.add_argument("policy", help="name or id")
    add.add_argument("server_url", metavar="URL", help="its base address")  # not --url
    add.add_argument("--kind", help="vllm, sglang, llama_cpp or openai")
    add.add_argument("--max-in-flight", type=int)
    add.set_defaults(run=resources.servers_add)
    remove = below.add_parser("remove", help="send it no new work")
    remove.add_argument("ids", nargs="+", metavar="ID")
    remove.set_defaults(run=resources.servers_remove)
    clear = below.add_parser("clear", help="remove all of a policy")
    clear.add_argument("--policy", help="name or id")
    clear.add_argument("--all", action="store_true", help="those of every policy of yours")
    clear.set_defaults(run=resources.servers_clear)


def _task_commands(commands: Any) -> None:
    tasks = commands.add_parser("tasks", help="tasks and task sets")
    below = tasks.add_subparsers(metavar="COMMAND", required=True)
    found = below.add_parser("list", help="show task sets, or the tasks of one")
    found.add_argument("task_set", nargs="?", metavar="SET", help="name or id")
    _limited(found, resources.tasks_list)
    imported = below.add_parser(
        "import",
        help="have the service import a file or folder into a task set (operators), or send a "
        "file's tasks to an experiment, which samples them",
    )
    imported.add_argument("file", metavar="PATH", help="file or folder; - is stdin")
    imported.add_argument("--set", dest="set_name", help="the task set; the service imports")
    imported.add_argument("--format", help="such as harbor, swe or verl; else told by the content")
    imported.add_argument("--options", help="how rows are read: JSON, or a file of it")
    imported.add_argument("--experiment", help="name or id: its own tasks, a JSON object a line")
    imported.add_argument("--environment", help="of tasks that name none: name or name@version")
    _submitting(imported, resources.tasks_import)

    trajectory = commands.add_parser("trajectory", help="what rollouts left")
    below = trajectory.add_subparsers(metavar="COMMAND", required=True)
    show = below.add_parser("show", help="one rollout's messages, reward and tokens")
    show.add_argument("rollout", metavar="ROLLOUT", help="id")
    show.add_argument("--tokens", action="store_true", help="the token ids too")
    show.set_defaults(run=resources.trajectory_show)


def _limited(parser: ArgumentParser, run: Any) -> None:
    parser.add_argument("--limit", type=_count, default=50, help="rows at most (%(default)d)")
    parser.set_defaults(run=run)


def _submitting(parser: ArgumentParser, run: Any) -> None:
    parser.add_argument("--samples", type=_count, help="rollouts of each group")
    parser.add_argument("--priority", type=int, help="higher goes first")
    parser.add_argument("--key", help="idempotency key: the same again submits nothing twice")
    parser.add_argument("--wait", action="store_true", help="until the groups are finished")
    parser.add_argument("--timeout", type=float, help="seconds that --wait takes at most")
    parser.set_defaults(run=run)


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError
    return value
