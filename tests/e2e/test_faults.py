"""What breaks, for real: workers killed, messages lost, the broker restarted, servers failing."""

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import redis

from tests.e2e.harness import JSON, WHOLE, Line, marker, wait_until, write_task

ImportFolder = Callable[..., None]


def ended_once(line: Line, rollout: JSON) -> None:
    """Check that the rollout ended exactly once and left nothing."""
    evaluations = line.sql(
        "SELECT count(*) FROM rollouts_evaluation WHERE rollout_id = %s", rollout["id"]
    )
    assert evaluations == [(1,)]
    done = line.sql("SELECT done_count, size FROM rollouts_group WHERE id = %s", rollout["group"])
    assert done[0][0] == done[0][1]
    wait_until(lambda: line.sandboxes_left([rollout["id"]]) == 0, "the sandboxes' end", 30)


@pytest.mark.parametrize("stage", ["init", "run", "eval"])
def test_a_worker_killed_in_each_stage_loses_nothing(
    line: Line, import_folder: ImportFolder, tmp_path: Path, stage: str
) -> None:
    name = f"kill-{stage}"
    ref = write_task(
        tmp_path,
        name,
        setup="sleep 4" if stage == "init" else "true",
        test=("sleep 4\n" if stage == "eval" else "") + "echo 1 > /logs/verifier/reward.txt",
    )
    import_folder(name, tmp_path)
    turns = ["sleep 6", "submit"] if stage == "run" else ["submit"]
    line.server.play({"marker": marker(name), "turns": turns, "after": "submit"})
    (rollout_id,) = line.submit(line.experiment(name), [ref])
    line.wait_running(rollout_id, stage)
    if stage == "run":
        wait_until(lambda: line.rollout(rollout_id)["turns"] == 1, "the command in flight")

    line.stack.started().kill(stage)
    line.stack.start(stage)

    (rollout,) = line.wait_done([rollout_id], seconds=90)
    assert (rollout["outcome"], rollout["reward"]) == ("scored", 1.0)
    states = [(a["stage"], a["state"]) for a in line.attempts(rollout_id)]
    assert (stage, "lost") in states
    ended_once(line, rollout)


def test_a_run_worker_killed_between_turns_is_resumed_with_its_shell(
    line: Line, import_folder: ImportFolder, tmp_path: Path
) -> None:
    ref = write_task(tmp_path, "resume")
    import_folder("resume", tmp_path)
    line.server.play(
        {
            "marker": marker("resume"),
            "turns": [
                "mkdir -p /app/deep && cd /app/deep && export KEPT=yes && echo first >> log",
                {"text": 'echo "$KEPT in $PWD with $(wc -l < log) line"', "delay_seconds": 4},
                "submit",
            ],
        }
    )
    (rollout_id,) = line.submit(line.experiment("resume"), [ref])
    observed = "SELECT count(*) FROM rollouts_journalentry WHERE rollout_id = %s AND kind = %s"
    wait_until(lambda: line.sql(observed, rollout_id, "observed") == [(1,)], "the first turn's end")

    line.stack.started().kill("run")
    line.stack.start("run")

    (rollout,) = line.wait_done([rollout_id])
    assert (rollout["outcome"], rollout["reward"], rollout["turns"]) == ("scored", 1.0, 3)
    assert rollout["restarts"] == 0
    assert [(a["stage"], a["state"]) for a in line.attempts(rollout_id)] == [
        ("init", "finished"),
        ("run", "lost"),
        ("run", "finished"),
        ("eval", "finished"),
    ]
    said = [m["content"] for m in line.trajectory(rollout_id)["messages"]]
    assert "yes in /app/deep with 1 line\n[exit code: 0]" in said
    ended_once(line, rollout)


@pytest.mark.parametrize("stage", ["run", "eval"])
def test_a_worker_shut_down_gives_its_work_back(
    line: Line, import_folder: ImportFolder, tmp_path: Path, stage: str
) -> None:
    name = f"shutdown-{stage}"
    ref = write_task(
        tmp_path,
        name,
        test=("sleep 8\n" if stage == "eval" else "") + "echo 1 > /logs/verifier/reward.txt",
    )
    import_folder(name, tmp_path)
    turns = ["sleep 30", "submit"] if stage == "run" else ["submit"]
    line.server.play({"marker": marker(name), "turns": turns, "after": "submit"})
    (rollout_id,) = line.submit(line.experiment(name, max_attempts=1), [ref])
    line.wait_running(rollout_id, stage)
    if stage == "run":
        wait_until(lambda: line.rollout(rollout_id)["turns"] == 1, "the command in flight")

    line.stack.started().stop(stage)
    (lost,) = [a for a in line.attempts(rollout_id) if a["stage"] == stage][:1]
    line.server.play()
    line.stack.start(stage)

    assert (lost["state"], lost["failure_code"]) == ("lost", "worker.shutdown")
    (rollout,) = line.wait_done([rollout_id])
    assert rollout["outcome"] == "scored"
    ended_once(line, rollout)


def _attempt_state(line: Line, rollout_id: str, stage: str) -> str | None:
    states = [a["state"] for a in line.attempts(rollout_id) if a["stage"] == stage]
    return states[-1] if states else None


def test_messages_thrown_away_while_nobody_listens_are_sent_again(
    line: Line, import_folder: ImportFolder, tmp_path: Path
) -> None:
    ref = write_task(tmp_path, "purged")
    import_folder("purged", tmp_path)
    assert line.stack.engines is not None
    client = redis.Redis.from_url(line.stack.engines.broker_url)
    init = line.stack.started().running["init"]
    init.send_signal(signal.SIGSTOP)
    try:
        (rollout_id,) = line.submit(line.experiment("purged"), [ref])
        wait_until(lambda: _attempt_state(line, rollout_id, "init") == "queued", "dispatch")
        wait_until(lambda: any(client.llen(key) for key in client.keys("init.*")), "the message")
        client.delete(*client.keys("init.*"))
    finally:
        init.send_signal(signal.SIGCONT)

    (rollout,) = line.wait_done([rollout_id])
    assert rollout["outcome"] == "scored"
    published = line.sql(
        "SELECT max(publish_count) FROM rollouts_attempt WHERE rollout_id = %s AND stage = 'init'",
        rollout_id,
    )
    attempts = line.attempts(rollout_id)
    assert published[0][0] >= 2 or len([a for a in attempts if a["stage"] == "init"]) >= 2
    ended_once(line, rollout)


def test_two_workers_handed_the_same_message_do_the_work_once(
    line: Line, import_folder: ImportFolder, tmp_path: Path
) -> None:
    ref = write_task(tmp_path, "twice")
    import_folder("twice", tmp_path)
    line.server.play(
        {"marker": marker("twice"), "turns": ["echo ran >> /app/count; sleep 3", "submit"]}
    )
    (rollout_id,) = line.submit(line.experiment("twice"), [ref])
    attempt = line.wait_running(rollout_id, "run")

    line.stack.manage(
        "shell",
        "-c",
        "from celery import current_app as app; from rollouts import queues; "
        f"[app.send_task('rollouts.tasks.run_run', ['{attempt['id']}'], "
        "queue=queues.stage_queue('run', None)) for _ in range(3)]",
    )

    (rollout,) = line.wait_done([rollout_id])
    assert [(a["stage"], a["state"]) for a in line.attempts(rollout_id)] == [
        ("init", "finished"),
        ("run", "finished"),
        ("eval", "finished"),
    ]
    ended_once(line, rollout)


def test_the_broker_restarted_in_the_middle(
    line: Line, import_folder: ImportFolder, tmp_path: Path
) -> None:
    ref = write_task(tmp_path, "broker")
    import_folder("broker", tmp_path)
    line.server.play({"marker": marker("broker"), "turns": ["sleep 2", "submit"]})
    rollouts = line.submit(line.experiment("broker"), [ref], samples=10)
    line.wait_running(rollouts[0], "run")

    assert line.stack.engines is not None
    line.stack.engines.restart_broker()

    done = line.wait_done(rollouts, seconds=150)
    assert {r["outcome"] for r in done} == {"scored"}
    for rollout in done:
        ended_once(line, rollout)


def test_an_image_that_does_not_exist_ends_without_a_reward(
    line: Line, import_folder: ImportFolder, tmp_path: Path
) -> None:
    ref = write_task(tmp_path, "no-image")
    line.operator.call("POST", "/images/", {"name": "nowhere", "source": "no/such/folder"})
    line.operator.call(
        "POST",
        "/environments/",
        {"name": "nowhere", "image": "nowhere", "tools": ["bash", "submit"]},
    )
    import_folder("no-image", tmp_path, environment="nowhere")

    (rollout,) = line.wait_done(line.submit(line.experiment("no-image"), [ref]))

    assert (rollout["outcome"], rollout["reward"]) == ("infra_failed", None)
    assert rollout["failure_code"] == "sandbox.image_missing"
    assert "no/such/folder" in rollout["failure_detail"]


def test_a_server_that_answers_garbage_never_enters_a_trajectory(
    line: Line, import_folder: ImportFolder, tmp_path: Path
) -> None:
    ref = write_task(tmp_path, "garbage")
    import_folder("garbage", tmp_path)
    line.server.control("garbage")
    experiment = line.experiment(
        "garbage", max_attempts=1, budgets={"inference_wait_seconds": 4, "max_turns": 3}
    )

    (rollout,) = line.wait_done(line.submit(experiment, [ref]))

    assert (rollout["outcome"], rollout["reward"]) == ("infra_failed", None)
    assert rollout["failure_code"] == "inference.malformed"
    stored = line.sql(
        "SELECT count(*) FROM rollouts_trajectory WHERE rollout_id = %s", rollout["id"]
    )
    assert stored == [(0,)]


def test_a_server_that_is_down_and_comes_back_costs_only_time(
    line: Line, import_folder: ImportFolder, tmp_path: Path
) -> None:
    ref = write_task(tmp_path, "down")
    import_folder("down", tmp_path)
    line.server.play({"marker": marker("down"), "turns": ["sleep 3", "submit"]})
    (rollout_id,) = line.submit(line.experiment("down"), [ref])
    wait_until(lambda: line.rollout(rollout_id)["turns"] == 1, "the first turn")

    line.server.kill()
    wait_until(
        lambda: not line.trainer.call("GET", "/inference-servers/")["results"][0]["healthy"],
        "the health check's finding",
    )
    line.server.start()

    (rollout,) = line.wait_done([rollout_id])
    assert (rollout["outcome"], rollout["turns"]) == ("scored", 2)
    ended_once(line, rollout)


def test_a_server_that_stays_down_ends_in_infra_failed_within_the_budget(
    line: Line, import_folder: ImportFolder, tmp_path: Path
) -> None:
    ref = write_task(tmp_path, "stays-down")
    import_folder("stays-down", tmp_path)
    line.server.kill()
    experiment = line.experiment(
        "stays-down", max_attempts=2, budgets={"inference_wait_seconds": 2}
    )

    (rollout,) = line.wait_done(line.submit(experiment, [ref]))

    assert (rollout["outcome"], rollout["reward"]) == ("infra_failed", None)
    assert rollout["failure_code"] in {"inference.no_server", "inference.unreachable"}
    assert [a["state"] for a in line.attempts(rollout["id"]) if a["stage"] == "run"] == [
        "failed",
        "failed",
    ]


def test_breaking_the_grader_does_not_pay(
    line: Line, import_folder: ImportFolder, tmp_path: Path
) -> None:
    ref = write_task(
        tmp_path,
        "break-grader",
        test="/usr/bin/env true && echo 1 > /logs/verifier/reward.txt",
        evaluator=WHOLE,
    )
    import_folder("break-grader", tmp_path)
    line.server.play({"marker": marker("break-grader"), "turns": ["rm -f /usr/bin/env", "submit"]})

    (rollout,) = line.wait_done(line.submit(line.experiment("break-grader"), [ref]))

    assert (rollout["outcome"], rollout["reward"]) == ("scored", 0.0)


def test_a_grader_that_is_broken_by_itself_gives_no_reward(
    line: Line, import_folder: ImportFolder, tmp_path: Path
) -> None:
    ref = write_task(tmp_path, "broken-grader", test="echo nan > /logs/verifier/reward.txt")
    import_folder("broken-grader", tmp_path)

    (rollout,) = line.wait_done(
        line.submit(line.experiment("broken-grader", max_attempts=1), [ref])
    )

    assert (rollout["outcome"], rollout["reward"]) == ("infra_failed", None)
    assert rollout["failure_code"] == "evaluator.reward_malformed"


def test_output_with_nul_bytes_is_only_output(
    line: Line, import_folder: ImportFolder, tmp_path: Path
) -> None:
    ref = write_task(tmp_path, "nul")
    import_folder("nul", tmp_path)
    line.server.play(
        {"marker": marker("nul"), "turns": ["printf 'a\\0b'; head -c 300 /bin/ls", "submit"]}
    )

    (rollout,) = line.wait_done(line.submit(line.experiment("nul"), [ref]))

    assert (rollout["outcome"], rollout["reward"], rollout["restarts"]) == ("scored", 1.0, 0)
    ended_once(line, rollout)


def test_making_the_tests_hang_does_not_pay(
    line: Line, import_folder: ImportFolder, tmp_path: Path
) -> None:
    ref = write_task(
        tmp_path,
        "hang-tests",
        test="test -e /app/x && cat /app/x; echo 0 > /logs/verifier/reward.txt",
    )
    import_folder("hang-tests", tmp_path)
    line.server.play({"marker": marker("hang-tests"), "turns": ["mkfifo /app/x", "submit"]})
    experiment = line.experiment("hang-tests", budgets={"eval_seconds": 6}, failure_reward=-1.0)

    (rollout,) = line.wait_done(line.submit(experiment, [ref]))

    assert (rollout["outcome"], rollout["reward"]) == ("scored", -1.0)
    assert len([a for a in line.attempts(rollout["id"]) if a["stage"] == "eval"]) == 1
    ended_once(line, rollout)


def test_using_up_the_memory_of_the_tests_does_not_pay(
    line: Line, import_folder: ImportFolder, tmp_path: Path
) -> None:
    line.operator.call(
        "POST",
        "/environments/",
        {
            "name": "small",
            "image": "base",
            "tools": ["bash", "submit"],
            "limits": {"memory_bytes": 200 * 1024**2},
        },
    )
    ref = write_task(
        tmp_path,
        "memory-tests",
        test=(
            'test -e /app/x && exec python3 -c "b = [bytearray(10**7) for _ in range(200)]; '
            'import time; time.sleep(30)"\necho 1 > /logs/verifier/reward.txt'
        ),
    )
    import_folder("memory-tests", tmp_path, environment="small")
    line.server.play({"marker": marker("memory-tests"), "turns": ["touch /app/x", "submit"]})

    (rollout,) = line.wait_done(
        line.submit(line.experiment("memory-tests", failure_reward=-1.0), [ref])
    )

    assert (rollout["outcome"], rollout["reward"]) == ("scored", -1.0)
    ended_once(line, rollout)
