"""The line's own properties: stages overlap, batches leave, sandboxes are clean, cancel works."""

from collections.abc import Callable
from contextlib import closing
from datetime import datetime
from pathlib import Path

import pytest

from examples.demo.trainer import ServiceRefused, Trainer
from tests.e2e.harness import JSON, Line, marker, wait_until, write_task

ImportFolder = Callable[..., None]


def moments(line: Line, rollouts: list[str], stage: str) -> list[datetime]:
    """Return when the attempts at a stage ended."""
    rows = line.sql(
        "SELECT ended_at FROM rollouts_attempt WHERE rollout_id = ANY(%s) AND stage = %s",
        rollouts,
        stage,
    )
    return [row[0] for row in rows]


def test_a_slow_evaluator_does_not_hold_up_run(
    line: Line, import_folder: ImportFolder, tmp_path: Path
) -> None:
    slow = write_task(tmp_path, "slow-test", test="sleep 20; echo 1 > /logs/verifier/reward.txt")
    quick = write_task(tmp_path, "quick-test")
    import_folder("overlap", tmp_path)
    command = {"turns": ["touch here", "ls", "submit"], "after": "submit"}
    line.server.play(
        {"marker": marker("slow-test"), **command}, {"marker": marker("quick-test"), **command}
    )
    experiment = line.experiment("overlap")

    slow_ones = line.submit(experiment, [slow], samples=2)
    first_slow_eval = line.wait_running(slow_ones[0], "eval")
    assert first_slow_eval["state"] == "running"
    others = line.submit(experiment, [quick, slow, quick, quick], samples=1)
    done = line.wait_done([*slow_ones, *others], seconds=120)

    assert {r["outcome"] for r in done} == {"scored"}
    last_run = max(moments(line, others, "run"))
    first_slow_end = min(moments(line, slow_ones, "eval"))
    assert last_run < first_slow_end


def test_a_batch_carries_exact_tokens_and_ends_acknowledged(
    line: Line, import_folder: ImportFolder, tmp_path: Path
) -> None:
    ref = write_task(tmp_path, "tokens")
    import_folder("tokens", tmp_path)
    line.server.play(
        {"marker": marker("tokens"), "turns": ["echo 'a <|im_end|> b' | tee x", "cat x", "submit"]}
    )
    experiment = line.experiment("tokens")
    line.wait_done(line.submit(experiment, [ref], samples=2))

    batch = line.trainer.call(
        "POST", f"/experiments/{experiment}/batches/", {"groups": 1, "wait_seconds": 20}
    )
    line.trainer.call("POST", f"/batches/{batch['id']}/ack/")
    line.trainer.call("POST", f"/batches/{batch['id']}/ack/")
    with pytest.raises(ServiceRefused, match="409"):
        line.trainer.call("POST", f"/batches/{batch['id']}/nack/")

    assert [t["sample"] for t in batch["trajectories"]] == [0, 1]
    for trajectory in batch["trajectories"]:
        (segment,) = trajectory["segments"]
        check_segment(segment, turns=3)
        assert trajectory["trainable"] is True
        assert trajectory["reward"] == 1.0
        assert trajectory["messages"][-1] == {"role": "assistant", "content": "submit"}


def check_segment(segment: JSON, *, turns: int) -> None:
    """Check lengths, mask, log-probabilities and versions of one segment."""
    length = len(segment["response_ids"])
    mask = segment["response_mask"]
    assert len(mask) == len(segment["response_logprobs"]) == length
    assert sum(run for _version, run in segment["policy_versions"]) == length
    assert len(segment["turns"]) == turns
    sampled = [0] * length
    for turn in segment["turns"]:
        sampled[turn["start"] : turn["end"]] = [1] * (turn["end"] - turn["start"])
    assert mask == sampled
    for value, is_sampled in zip(segment["response_logprobs"], mask, strict=True):
        assert (value < 0) == bool(is_sampled)


def test_what_the_agent_did_is_graded_in_another_sandbox_without_its_processes(
    line: Line, import_folder: ImportFolder, tmp_path: Path
) -> None:
    ref = write_task(
        tmp_path,
        "fresh",
        setup="mkdir -p /app && echo from-setup > /app/given",
        test=(
            "pgrep -f 'sleep 4242' && exit 1\n"
            'test "$(cat /app/given)" = from-setup && test "$(cat /app/made)" = by-agent '
            "&& test ! -e /setup && echo 1 > /logs/verifier/reward.txt"
        ),
    )
    import_folder("fresh", tmp_path)
    line.server.play(
        {
            "marker": marker("fresh"),
            "turns": [
                "(setsid sleep 4242 &) ; export X=by-agent; cd /app",
                'echo "$X" > made; test ! -e /tests; echo "hidden: $?"; id -u',
                "submit",
            ],
        }
    )

    (rollout,) = line.wait_done(line.submit(line.experiment("fresh"), [ref]))

    assert (rollout["outcome"], rollout["reward"]) == ("scored", 1.0)
    said = [m["content"] for m in line.trajectory(rollout["id"])["messages"]]
    assert any(text.startswith("hidden: 0\n0\n") for text in said), said


@pytest.mark.parametrize("stage", ["queued", "init", "run", "eval"])
def test_cancel_in_each_state_removes_the_sandbox(
    line: Line, import_folder: ImportFolder, tmp_path: Path, stage: str
) -> None:
    name = f"cancel-{stage}"
    ref = write_task(
        tmp_path,
        name,
        setup="sleep 60" if stage == "init" else "true",
        test="sleep 50" if stage == "eval" else "true",
    )
    import_folder(name, tmp_path)
    turns = ["sleep 55", "submit"] if stage == "run" else ["submit"]
    line.server.play({"marker": marker(name), "turns": turns, "after": "submit"})
    experiment = line.experiment(name)
    if stage == "queued":
        line.trainer.call("POST", f"/experiments/{experiment}/pause/")
    (rollout_id,) = line.submit(experiment, [ref])
    if stage != "queued":
        line.wait_running(rollout_id, stage)

    line.trainer.call("POST", f"/rollouts/{rollout_id}/cancel/")

    (rollout,) = line.wait_done([rollout_id], seconds=20)
    assert (rollout["outcome"], rollout["reward"]) == ("cancelled", None)
    wait_until(lambda: line.sandboxes_left([rollout_id]) == 0, "the sandbox's end", 20)
    with pytest.raises(ServiceRefused, match=r"409.*rollout\.done"):
        line.trainer.call("POST", f"/rollouts/{rollout_id}/cancel/")


def test_another_trainer_sees_and_changes_nothing(line: Line) -> None:
    experiment = line.experiment()
    token = line.stack.manage("create_trainer", "mallory", "--quiet").strip()

    with closing(Trainer(line.stack.url, token)) as mallory:
        for method, path in (
            ("GET", f"/experiments/{experiment}/"),
            ("POST", f"/experiments/{experiment}/stop/"),
            ("POST", f"/experiments/{experiment}/batches/"),
        ):
            with pytest.raises(ServiceRefused, match=r"404.*not_found"):
                mallory.call(method, path, {} if method == "POST" else None)

    assert line.trainer.call("GET", f"/experiments/{experiment}/")["state"] == "active"
