"""Many rollouts in one run worker: all wait at once, none is starved, none is lost."""

import os
from collections.abc import Iterator

import httpx
import pytest

from benchmarks.rollouts.line import Line, open_line
from benchmarks.rollouts.slow_server import MODEL

COUNT, TURNS = 48, 3
ENDLESS = 10**9
# Leases stay as they are: what is shown here is that a busy process does not lose its own.
TIMINGS = {"PRORL_DISPATCH_SECONDS": "0.5", "PRORL_REAPER_SECONDS": "1"}


@pytest.fixture(scope="module")
def many() -> Iterator[Line]:
    """Yield a stack whose sandboxes are scripted: it needs no Apptainer."""
    with pytest.MonkeyPatch.context() as patched:
        for name in [name for name in os.environ if name.startswith("PRORL_")]:
            patched.delenv(name)
        with open_line(
            rollouts=COUNT,
            runtime="fake",
            turns=TURNS,
            tokens=16,
            latency=0.0,
            events=2,
            **TIMINGS,
        ) as line:
            yield line


def check_whole(line: Line, rollouts: list[str]) -> None:
    """Check that every rollout was scored after all its turns, each counted once."""
    (found,) = line.sql(
        "SELECT outcome, reward, turns, restarts, count(DISTINCT sampled_tokens), count(*) "
        "FROM rollouts_rollout WHERE id = ANY(%s) GROUP BY 1, 2, 3, 4",
        rollouts,
    )
    assert found == ("scored", 1.0, TURNS, 0, 1, COUNT)


def run_attempts(line: Line, rollouts: list[str]) -> list[tuple[str, str, int, int]]:
    """Return the RUN attempts' states and codes, by how many processes, of how many rollouts.

    What is given back may reach the ending process once more, which gives it back again.
    """
    return [
        (str(state), str(code), int(workers), int(count))
        for state, code, workers, count in line.sql(
            "SELECT state, failure_code, count(DISTINCT worker_id), "
            "count(DISTINCT rollout_id) FROM rollouts_attempt "
            "WHERE rollout_id = ANY(%s) AND stage = 'run' GROUP BY 1, 2 ORDER BY 1",
            rollouts,
        )
    ]


def test_all_wait_at_once_in_one_process_and_all_go_on(many: Line) -> None:
    # The server answers nobody until all of them wait: in every turn.
    many.control(together=COUNT)

    rollouts = many.submit(COUNT)
    many.wait_done(rollouts)

    assert many.state()["peak_in_flight"] == COUNT
    assert run_attempts(many, rollouts) == [("finished", "", 1, COUNT)]
    check_whole(many, rollouts)


def test_a_worker_that_ends_gives_all_of_them_back(many: Line) -> None:
    many.control(together=ENDLESS)
    rollouts = many.submit(COUNT)
    many.wait_held(COUNT)
    worker = many.stack.started().running["run"]

    many.stack.started().stop("run")
    given_back = run_attempts(many, rollouts)
    many.control(together=0)
    many.stack.start("run")
    many.wait_done(rollouts)

    assert worker.returncode == 0
    assert ("lost", "worker.shutdown", 1, COUNT) in given_back
    assert {state for state, *_ in given_back} <= {"lost", "queued"}
    assert run_attempts(many, rollouts) == [
        ("finished", "", 1, COUNT),
        ("lost", "worker.shutdown", 1, COUNT),
    ]
    check_whole(many, rollouts)


def test_a_broker_that_restarts_costs_no_rollout(many: Line) -> None:
    many.control(together=ENDLESS)
    rollouts = many.submit(COUNT)
    many.wait_held(COUNT)
    assert many.stack.engines is not None

    many.stack.engines.restart_broker()
    many.control(together=0)
    many.wait_done(rollouts)

    assert run_attempts(many, rollouts) == [("finished", "", 1, COUNT)]
    check_whole(many, rollouts)


def test_what_the_service_tries_out_is_no_rollout_to_the_server(many: Line) -> None:
    # Held with the others it would stand for one of them, which would then wait for ever.
    many.control(together=ENDLESS)
    before = many.state()

    body = {"model": MODEL, "prompt": [1, 2], "max_tokens": 1, "logprobs": 0}
    answer = httpx.post(f"{many.server}/v1/completions", json=body, timeout=30)

    (choice,) = answer.raise_for_status().json()["choices"]
    assert len(choice["token_ids"]) == 1
    assert many.state() == before
