"""The command line: what it sends, prints and returns."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import prorl_client
import pytest
from prorl_client.cli.main import main

from tests.clients import shapes
from tests.clients.scripted import BROKEN, Reply, Scripted, page, problem
from tests.clients.test_events import STREAM, stream
from tests.clients.test_submit import accept, group

E1 = "11111111-1111-1111-1111-111111111111"
EXPERIMENT = shapes.experiment(
    id=E1, rollouts={"queued": 1, "done": 2}, coming={"open": 1, "ready": 0}, feed_detail="waits"
)
AT = f"/experiments/{E1}"
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(
    service: Scripted, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Run:
    """Return a function that runs a command: its status, what it printed, what it said."""
    monkeypatch.setenv("PRORL_URL", service.url)
    monkeypatch.setenv("PRORL_TOKEN", "secret")
    service.on("GET", "/experiments/", page(shapes.experiment(id=E1)))
    service.on("GET", f"{AT}/", Reply(body=EXPERIMENT))
    service.on("POST", f"{AT}/groups/", accept)

    def call(*words: str) -> tuple[int, str, str]:
        status = main(list(words))
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return call


def test_submit_by_name_waits_and_shows(service: Scripted, run: Run) -> None:
    for place in (0, 1):
        ready = group("ready", f"k-0:{place}", task_ref=f"t{place}", done=2, filter_rule="")
        service.on("GET", f"/groups/k-0%3A{place}/", ready)

    status, out, err = run(
        "submit", "demo", "t0", "t1", "--samples", "2", "--priority", "5", "--key", "k", "--wait"
    )

    assert (status, err) == (0, "Submitted 2 groups to demo.\n")
    lines = out.splitlines()
    assert lines[0].split() == ["ID", "TASK_REF", "STATE", "SAMPLES", "DONE", "FILTER_RULE"]
    assert lines[1].split() == ["k-0:0", "t0", "ready", "2", "2"]
    sent = service.calls("POST", f"{AT}/groups/")[0]
    common = {"samples": 2, "priority": 5}
    assert sent.body == {"groups": [{**common, "task_ref": "t0"}, {**common, "task_ref": "t1"}]}
    assert sent.key == "k-0"
    assert service.calls("GET", "/experiments/")[0].query["name"] == ["demo"]


def test_submit_from_a_file(service: Scripted, run: Run, tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text('"a"\n\n{"task_ref": "b", "samples": 3}\n')

    status, out, _err = run("--json", "submit", E1, "--file", str(file))

    entries = service.calls("POST", f"{AT}/groups/")[0].body["groups"]
    assert status == 0
    assert entries == [{"task_ref": "a"}, {"task_ref": "b", "samples": 3}]
    assert [json.loads(line)["task"] for line in out.splitlines()] == ["t", "t"]


def test_submit_from_standard_input(
    service: Scripted, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO('"a"\n'))

    assert run("submit", E1, "--file", "-")[0] == 0

    assert service.calls("POST", f"{AT}/groups/")[0].body == {"groups": [{"task_ref": "a"}]}


def test_broken_submission_says_how_to_go_on(service: Scripted, run: Run) -> None:
    service.on("POST", f"{AT}/groups/", BROKEN)

    status, _out, err = run("--insist", "0", "submit", E1, "a", "--key", "k")

    assert status == 6
    assert "Run it again with --key k:" in err
    assert "no answer from" in err


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "tasks.jsonl:1: not JSON"),
        ("5", "tasks.jsonl:1: write a task's reference as text"),
        ('"a"\n{"instruction": "x"}', "tasks.jsonl:2: write a task's reference"),
    ],
)
def test_bad_file_is_refused_before_anything_is_sent(
    service: Scripted, run: Run, tmp_path: Path, content: str, words: str
) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text(content)

    status, _out, err = run("submit", E1, "--file", str(file))

    assert (status, words in err) == (2, True)
    assert service.asked == []


def test_import_sends_whole_tasks(service: Scripted, run: Run, tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    rows: list[dict[str, Any]] = [
        {"ref": "sum-1", "instruction": "1+1?", "answer": 2, "evaluator": "exact"},
        {"environment": "own@2", "instruction": "Go.", "payload": {"a": 1}, "hidden": {"b": 2}},
    ]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))

    status, _out, err = run(
        "tasks", "import", str(file), "--experiment", "demo", "--environment", "calc"
    )

    sent = [each["inline"] for each in service.calls("POST", f"{AT}/groups/")[0].body["groups"]]
    assert (status, "Sent 2 tasks to demo as groups" in err) == (0, True)
    assert sent == [
        {
            "environment": "calc",
            "instruction": "1+1?",
            "hidden": {"evaluator_payload": {"answer": 2}, "evaluator": "exact"},
            "metadata": {"ref": "sum-1"},
        },
        {
            "environment": "own@2",
            "instruction": "Go.",
            "payload": {"a": 1},
            "hidden": {"b": 2},
        },
    ]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"instruction": "x"}, "it has no environment"),
        ({"environment": "e"}, "it has no instruction"),
        ({"environment": "e", "instruction": "x", "reward": 1}, "unknown field 'reward'"),
        ({"environment": "e", "instruction": "x", "hidden": []}, "hidden must be an object"),
        ([], "a task is a JSON object"),
    ],
)
def test_import_says_which_line_is_no_task(run: Run, tmp_path: Path, row: Any, words: str) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text(json.dumps(row))

    status, _out, err = run("tasks", "import", str(file), "--experiment", "demo")

    assert (status, f"{file}:1: {words}" in err) == (2, True)


def test_import_of_nothing(run: Run, tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")

    assert run("tasks", "import", str(empty), "--experiment", "demo")[0] == 2
    assert run("tasks", "import", str(tmp_path / "none.jsonl"), "--experiment", "demo")[0] == 2
    assert run("submit", "demo")[0] == 2


def test_watch_shows_how_it_stands_and_what_happens(service: Scripted, run: Run) -> None:
    stopped = (
        b'id: 3-0\ndata: {"kind":"experiment.state","at":"2026-11-30T10:00:00Z",'
        b'"state":"stopped"}\n\n'
    )
    service.on("GET", f"{AT}/events/", stream(STREAM + stopped))

    status, out, _err = run("watch", "demo", "--after", "0-1", "--kinds", "counts")

    assert status == 0
    assert "demo (11111111-1111-1111-1111-111111111111) is active, fed by push." in out
    assert "Rollouts: 1 queued, 2 done" in out
    assert "Feed: waits" in out
    assert "2026-11-30T10:00:00+00:00  group.ready         group=g1" in out
    assert out.rstrip().endswith("experiment.state    state=stopped")
    asked = service.calls("GET", f"{AT}/events/")[0]
    assert (asked.headers["last-event-id"], asked.query["kinds"]) == ("0-1", ["counts"])


def test_watch_once_and_as_json(run: Run) -> None:
    status, out, _err = run("--json", "watch", E1, "--once")

    assert status == 0
    assert json.loads(out) == {"kind": "status", **EXPERIMENT}


def test_batches(service: Scripted, run: Run) -> None:
    service.on("GET", f"{AT}/batches/", page(shapes.batch(), shapes.batch(number=2)))

    status, out, _err = run("batches", "demo", "--state", "leased", "--limit", "1")

    assert status == 0
    assert out.splitlines()[1].split()[:3] == [shapes.BATCH, "1", "leased"]
    assert len(out.splitlines()) == 2
    assert service.calls("GET", f"{AT}/batches/")[0].query["state"] == ["leased"]


def test_nothing_to_list(service: Scripted, run: Run) -> None:
    service.on("GET", f"{AT}/batches/", page())

    assert run("batches", "demo") == (0, "", "None.\n")
    assert run("--json", "batches", "demo") == (0, "", "")


def test_cancel(service: Scripted, run: Run) -> None:
    row = {"id": "r1", "experiment": E1, "group": "g1", "task": "t", "task_ref": "sum"}
    rollout = {**row, "sample": 0, "environment": "e@1", "state": "run"}
    service.on("GET", "/rollouts/r1/", Reply(body=rollout))
    service.on("POST", "/rollouts/r1/cancel/", Reply(202, rollout))
    service.on("GET", "/groups/g1/", group("open"))
    service.on("POST", "/groups/g1/cancel/", problem(409, "group.not_open", "It is ready."))
    service.on("POST", f"{AT}/stop/", Reply(202, {"state": "stopped", "cancelled": 4}))

    assert run("cancel", "rollout", "r1") == (0, "r1  run\n", "")
    status, _out, err = run("cancel", "group", "g1")
    assert (status, "group.not_open (409): It is ready." in err) == (5, True)
    assert run("cancel", "experiment", "demo")[1] == "demo  stopped, 4 rollouts cancelled\n"


def test_servers(service: Scripted, run: Run) -> None:
    row = {"id": "s1", "policy": "tiny", "url": "http://a", "kind": "vllm", "state": "active"}
    service.on(
        "GET", "/inference-servers/", page({**row, "healthy": True, "detail": "a\x1b[2Jb\nc"})
    )
    service.on("POST", "/inference-servers/", Reply(201, row))
    service.on("DELETE", "/inference-servers/s1/", Reply(204))
    service.on("POST", "/inference-servers/clear/", Reply(body={"removed": 2}))

    status, out, _err = run("servers")
    assert status == 0
    assert (
        out.splitlines()[1]
        == "s1  tiny    http://a  vllm  active  true     -              a [2Jb c"
    )
    assert run("servers", "list", "--policy", "tiny")[0] == 0
    assert run("servers", "add", "tiny", "http://a", "--kind", "vllm")[2] == ""
    assert run("servers", "remove", "s1")[1] == "s1  removed\n"
    assert run("servers", "clear")[0] == 2
    assert run("servers", "clear", "--policy", "tiny")[1] == "2 servers removed\n"
    assert run("servers", "clear", "--all")[0] == 0
    assert [each.body for each in service.calls("POST", "/inference-servers/clear/")] == [
        {"policy": "tiny"},
        {},
    ]
    assert service.calls("POST", "/inference-servers/")[0].body == {
        "policy": "tiny",
        "url": "http://a",
        "kind": "vllm",
    }


def test_tasks_list(service: Scripted, run: Run) -> None:
    task = {"id": "t1", "task_set": "s1", "ref": "sum", "environment": "calc@1"}
    service.on("GET", "/task-sets/", page({"id": "s1", "name": "math", "task_count": 1}))
    service.on("GET", "/task-sets/s1/tasks/", page({**task, "instruction": "1+1?\n" + "x" * 99}))

    assert run("tasks", "list")[1].splitlines()[1].split()[:3] == ["s1", "math", "1"]
    line = run("tasks", "list", "math")[1].splitlines()[1]
    assert line.split()[:3] == ["t1", "sum", "calc@1"]
    assert line.endswith("x…")
    status, _out, err = run("tasks", "list", "none")
    assert (status, "There is no task set 'none'" in err) == (2, True)


def test_trajectory_show(service: Scripted, run: Run) -> None:
    rollout = shapes.rollout_id(1)
    row = {"id": rollout, "experiment": E1, "group": "g1", "task": "t", "task_ref": "sum"}
    row = {**row, "sample": 1, "environment": "e@1", "state": "done"}
    messages = [
        {"role": "user", "content": "1+1?"},
        {
            "role": "assistant",
            "content": "\x1b]0;owned\x07",
            "tool_calls": [{"function": {"name": "bash", "arguments": "{}"}}],
        },
    ]
    service.on("GET", f"/rollouts/{rollout}/", Reply(body=row))
    made = Reply(body=shapes.trajectory(1, messages=messages))
    service.on("GET", f"/rollouts/{rollout}/trajectory/", made)

    status, out, _err = run("trajectory", "show", rollout)
    assert status == 0
    assert "reward    1.0  {'exact': 1.0}" in out
    assert "[assistant]\n\ufffd]0;owned\ufffd\n-> bash({})" in out
    assert "response_ids" not in out
    assert "response_ids: [10, 11, 12]" in run("trajectory", "show", rollout, "--tokens")[1]
    brief = json.loads(run("--json", "trajectory", "show", rollout)[1])
    assert brief["segments"][0]["sampled_tokens"] == 2
    assert "response_ids" not in brief["segments"][0]
    whole = json.loads(run("--json", "trajectory", "show", rollout, "--tokens")[1])
    assert whole["segments"] == [shapes.segment()]


def test_export(service: Scripted, run: Run, tmp_path: Path) -> None:
    row = {"experiment": E1, "group": "g", "task": "t", "task_ref": "s", "environment": "e@1"}
    service.on("GET", "/rollouts/", page({"id": "r1", "sample": 1, "state": "done", **row}))
    service.on("GET", "/rollouts/r1/trajectory/", Reply(body=shapes.trajectory(1)))
    path = tmp_path / "out.jsonl"

    assert run("export", "demo", str(path), "--outcome", "all") == (
        0,
        f"1 trajectories in {path}\n",
        "",
    )
    assert len(path.read_text().splitlines()) == 1
    assert run("export", "demo", str(tmp_path / "out.csv"))[0] == 2


@pytest.mark.parametrize(
    ("reply", "status"),
    [
        (problem(400, "request.invalid"), 1),
        (problem(401, "auth.invalid"), 3),
        (problem(404, "not_found"), 4),
        (problem(409, "x.y"), 5),
        (problem(500, "server.error"), 6),
    ],
)
def test_exit_status(service: Scripted, run: Run, reply: Reply, status: int) -> None:
    service.on("GET", f"{AT}/", reply)

    assert run("watch", E1, "--once")[0] == status


def test_wait_that_ends(service: Scripted, run: Run) -> None:
    service.on("GET", "/groups/k-0%3A0/", group("open", "k-0:0"))

    status, _out, err = run("submit", E1, "a", "--key", "k", "--wait", "--timeout", "0")

    assert (status, "1 of 1 groups are still open" in err) == (7, True)


def test_name_of_several_experiments_or_none(service: Scripted, run: Run) -> None:
    service.on("GET", "/experiments/", page(shapes.experiment(), shapes.experiment(id="e2")))
    status, _out, err = run("batches", "demo")
    assert (status, "Several experiments are named 'demo'" in err, "e2" in err) == (2, True, True)

    service.on("GET", "/experiments/", page())
    assert run("batches", "demo")[0] == 2


@pytest.mark.parametrize("words", [["--help"], ["submit", "--help"]])
def test_help(run: Run, words: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run(*words)

    assert ended.value.code == 0


@pytest.mark.parametrize("words", [[], ["nothing"], ["batches", "demo", "--limit", "0"]])
def test_wrong_use(run: Run, words: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run(*words)

    assert ended.value.code == 2


def test_token_from_a_file(
    service: Scripted, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PRORL_TOKEN")
    file = tmp_path / "token"
    file.write_text("from-file\n")

    assert run("--token-file", str(file), "watch", E1, "--once")[0] == 0

    assert service.asked[0].headers["authorization"] == "Bearer from-file"
    assert run("watch", E1, "--once")[0] == 2


def test_module_is_the_command_and_a_reader_that_left_is_no_fault(service: Scripted) -> None:
    service.on("GET", "/experiments/", page(*(shapes.experiment() for _ in range(5000))))
    environment = {
        **os.environ,
        "PRORL_URL": service.url,
        "PRORL_TOKEN": "secret",
        "PYTHONPATH": str(Path(prorl_client.__file__).parent.parent),
    }
    command = [sys.executable, "-m", "prorl_client", "--json", "experiments", "--limit", "5000"]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert json.loads(process.stdout.readline())["name"] == "demo"
        process.stdout.close()
        assert (process.stderr.read(), process.wait(60)) == (b"", 0)


IMPORTS = "/task-sets/imports/"


def task_import(**values: Any) -> dict[str, Any]:
    return {
        "id": "0198c7f2-0000-7000-8000-00000000000a",
        "set_name": "sums",
        "state": "queued",
        "format": "jsonl",
        "source": "upload",
        "name": "rows.jsonl",
        "created": 0,
        "changed": 0,
        "unchanged": 0,
        "rejected": 0,
        "error": "",
        **values,
    }


@pytest.mark.parametrize(("rejected", "status"), [(0, 0), (1, 1)])
def test_import_into_a_set_is_the_services_work(
    service: Scripted, run: Run, tmp_path: Path, rejected: int, status: int
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b'{"a": 1}\n')
    done = task_import(state="done", created=2, rejected=rejected)
    service.on("POST", IMPORTS, Reply(202, task_import()))
    service.on("GET", f"{IMPORTS}{done['id']}/", Reply(200, done))
    rows = [{"number": 2, "place": "rows.jsonl:2", "reason": "no JSON", "raw": "{"}][:rejected]
    service.on("GET", f"{IMPORTS}{done['id']}/rejected/", page(*rows))

    ended, out, err = run(
        *("tasks", "import", str(file), "--set", "sums", "--format", "jsonl"),
        *("--options", '{"evaluator": "exact"}'),
    )

    (sent,) = service.calls("POST", IMPORTS)
    assert (sent.body, sent.headers["content-length"]) == ({"a": 1}, "9")
    assert sent.query == {
        "set_name": ["sums"],
        "name": ["rows.jsonl"],
        "format": ["jsonl"],
        "options": ['{"evaluator": "exact"}'],
    }
    assert ended == status
    assert f"2 created, 0 changed, 0 unchanged, {rejected} rejected" in out
    assert ("refused rows.jsonl:2: no JSON" in err) == bool(rejected)


def test_import_wants_a_set_or_an_experiment(run: Run) -> None:
    assert run("tasks", "import", "x")[0] == 2
    assert run("tasks", "import", "x", "--set", "a", "--experiment", "b")[0] == 2
    assert run("tasks", "import", "/nowhere/x", "--set", "a")[0] == 2
