"""Real Celery workers: a wrong one refuses to start, a right one registers and ends."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from prorl_site.stack.engines import Engines
from prorl_site.stack.processes import ROOT, stack_environment
from prorl_site.stack.stack import Stack

pytestmark = pytest.mark.broker


@pytest.fixture(scope="module")
def environment(
    engines: Engines, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, str]]:
    var = tmp_path_factory.mktemp("workers")
    kept = os.environ.pop("PRORL_VAR", None)
    stack = Stack(var, settings={"PRORL_RUNTIME": "local"}, database="workers", engines=engines)
    try:
        stack.prepare()
        yield stack_environment(var)
    finally:
        stack.engines = None
        stack.stop()
        if kept is not None:
            os.environ["PRORL_VAR"] = kept


def start(environment: dict[str, str], *arguments: str, **extra: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [str(Path(sys.executable).parent / "celery"), "-A", "prorl_site", "worker", *arguments],
        cwd=ROOT,
        env={**environment, **extra},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.parametrize(
    ("arguments", "extra", "says"),
    [
        (("-Q", "run", "--pool", "prefork"), {}, "Queue 'run' needs `--pool threads`"),
        (("-Q", "eval", "--pool", "threads"), {}, "Queue 'eval' needs `--pool prefork`"),
        (("-Q", "init,run", "--pool", "threads"), {}, "start one worker per stage"),
        (("-Q", "run", "--pool", "threads"), {"PRORL_TYPO": "1"}, "Unknown setting PRORL_TYPO"),
        (
            ("-Q", "run", "--pool", "threads"),
            {"PRORL_HARD_LIMIT_SECONDS": "10"},
            "must be below PRORL_HARD_LIMIT_SECONDS",
        ),
    ],
)
def test_a_wrong_worker_refuses_to_start_and_says_why(
    environment: dict[str, str], arguments: tuple[str, ...], extra: dict[str, str], says: str
) -> None:
    worker = start(environment, *arguments, "-c", "1", **extra)

    output, _nothing = worker.communicate(timeout=60)

    assert worker.returncode != 0
    assert "This worker cannot start:" in output
    assert says in output


def test_a_worker_adds_its_nodes_queue_registers_and_ends_its_registration(
    environment: dict[str, str],
) -> None:
    import psycopg

    worker = start(environment, "-Q", "init", "--pool", "threads", "-c", "3", PRORL_NODE="here")
    assert worker.stdout is not None
    lines = []
    for line in worker.stdout:
        lines.append(line)
        if line.rstrip().endswith("ready."):
            break
    query = (
        "SELECT n.name, w.stage, w.concurrency, w.ended_at IS NULL FROM rollouts_worker w "
        "JOIN sandboxes_node n ON n.id = w.node_id WHERE w.pid = %s"
    )
    with psycopg.connect(environment["DATABASE_URL"], autocommit=True) as connection:
        registered = []
        while not registered:
            registered = connection.execute(query, [worker.pid]).fetchall()
        worker.terminate()
        worker.communicate(timeout=30)
        ended = connection.execute(query, [worker.pid]).fetchall()

    assert any("init.here" in line for line in lines)
    assert registered == [("here", "init", 3, True)]
    assert ended == [("here", "init", 3, False)]
