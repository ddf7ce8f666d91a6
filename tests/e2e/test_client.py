"""A trainer's loop with the client, over the whole line: pull, train, exchange weights, again."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import numpy as np
from prorl_client import Client, read_jsonl

from prorl_site.stack.processes import ROOT
from tests.e2e.harness import Line, marker, write_task


def test_training_loop(
    line: Line, import_folder: Callable[..., None], tmp_path: Path, tokenizer_folder: Path
) -> None:
    names = ("one", "two", "three", "four")
    folder = tmp_path / "tasks"
    for name in names:
        write_task(folder, f"client-{name}")
    import_folder("client", folder)
    turns = ["echo $((6 * 7))", "submit"]
    line.server.play(*({"marker": marker(f"client-{name}"), "turns": turns} for name in names))

    with Client(line.stack.url, line.trainer.token) as client:
        policy = client.create_policy(
            "client-loop",
            "scripted-not-a-model",
            tokenizer=str(tokenizer_folder),
            context_tokens=32768,
        )
        server = client.add_server(policy.name, line.server.url, kind="vllm", max_in_flight=64)
        before = policy.version
        experiment = client.create_experiment(
            "client",
            policy.name,
            task_sets=["client"],
            group_size=2,
            sampling={"max_tokens": 4096},
            budgets={"max_turns": 8, "tool_seconds": 60, "inference_wait_seconds": 30},
            feed="pull",
            feed_settings={"batch_groups": 2, "epochs": 1},
            max_policy_lag=1,
        )
        seen: list[str] = []
        for batch in experiment.batches(groups=2, timeout=120):
            with batch:
                assert [len(group) for group in batch.groups] == [2, 2]
                seen += [group[0].task_ref for group in batch.groups]
                for trajectory in batch:
                    (segment,) = trajectory.segments
                    sampled = segment.response_mask == 1
                    assert trajectory.trainable
                    assert trajectory.sampled_tokens == int(sampled.sum()) > 0
                    assert len(segment.turns) == trajectory.turns == 2
                    assert np.all(segment.response_logprobs[~sampled] == 0.0)
                    assert set(segment.policy_versions.tolist()) <= {before, before + 1}
            version = policy.refresh().version + 1
            with policy.update(version, mode="drain-calls"):
                pass  # the scripted server has no weights

        assert sorted(seen) == sorted(f"e2e/client-{name}" for name in names)
        assert experiment.refresh().exhausted
        assert policy.refresh().version == before + 2
        assert [each.state for each in experiment.leases()] == ["acknowledged"] * 2
        assert experiment.export(tmp_path / "out.jsonl") == 8
        exported = [each.messages or () for each in read_jsonl(tmp_path / "out.jsonl")]
        assert [messages[-1]["content"] for messages in exported] == ["submit"] * 8
        kinds = ["batch.leased", "batch.acknowledged"]
        events = islice(experiment.events("0-0", kinds=kinds), 4)
        assert [each.kind for each in events] == kinds * 2
        client.remove_server(server.id)


def test_command_line(line: Line, import_folder: Callable[..., None], tmp_path: Path) -> None:
    ref = write_task(tmp_path, "client-cli")
    import_folder("client-cli", tmp_path)
    experiment = line.experiment("client-cli")

    def run(*words: str) -> list[dict[str, object]]:
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT / "clients" / "python"),
            "PRORL_URL": line.stack.url,
            "PRORL_TOKEN": line.trainer.token,
        }
        done = subprocess.run(
            [sys.executable, "-m", "prorl_client", "--json", *words],
            env=environment,
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert done.returncode == 0, done.stderr
        return [json.loads(each) for each in done.stdout.splitlines()]

    (group,) = run("submit", experiment, ref, "--samples", "2", "--wait", "--timeout", "120")

    assert (group["state"], group["done"]) == ("ready", 2)
    (status,) = run("watch", experiment, "--once")
    assert status["rollouts"] == {"queued": 0, "init": 0, "run": 0, "eval": 0, "done": 2}
    (server,) = run("servers", "list", "--policy", "scripted")
    assert server["healthy"] is True
    rollout = line.trainer.call("GET", f"/groups/{group['id']}/")["rollouts"][0]
    (shown,) = run("trajectory", "show", rollout)
    assert shown["reward"] == 1.0


def test_waiting_outlives_a_restart_of_the_service(
    line: Line, import_folder: Callable[..., None], tmp_path: Path
) -> None:
    ref = write_task(tmp_path, "client-restart")
    import_folder("client-restart", tmp_path)
    with (
        Client(line.stack.url, line.trainer.token) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        experiment = client.experiment(line.experiment("client-restart"))
        waiting = pool.submit(experiment.lease, 1, timeout=240)

        web = line.stack.started().running["web"]
        web.kill()
        web.wait()
        line.ensure_up()
        experiment.submit([ref], samples=1)

        batch = waiting.result()
        batch.ack()
        assert [each.task_ref for each in batch] == [ref]
        assert [each.state for each in experiment.leases()] == ["acknowledged"]
