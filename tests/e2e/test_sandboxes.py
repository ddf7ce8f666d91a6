"""Sandboxes through the whole line: setups shared, started ahead, kept, connected, cleaned up."""

import http.server
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import psycopg
import pytest

from examples.demo.trainer import ServiceRefused
from tests.e2e.harness import JSON, WHOLE, Line, marker, wait_until, write_task

ImportFolder = Callable[..., None]


@pytest.fixture
def environment(line: Line) -> Callable[..., str]:
    """Return a function that makes an environment over the base image; returns its name."""

    def make(name: str, **values: Any) -> str:
        body = {
            "name": name,
            "image": "base",
            "agent": "command_line",
            "tools": ["bash", "submit"],
            **values,
        }
        line.operator.call("POST", "/environments/", body)
        return name

    return make


def said(line: Line, rollout: str) -> list[str]:
    """Return what the shell answered in an episode, without the demonstrations before it."""
    messages = line.trajectory(rollout)["messages"]
    asked = next(place for place, m in enumerate(messages) if "Marker " in m["content"])
    return [str(m["content"]) for m in messages[asked + 1 :] if m["role"] != "assistant"]


def test_sixteen_rollouts_of_a_task_run_its_setup_once(
    line: Line, import_folder: ImportFolder, tmp_path: Path
) -> None:
    draw = "cat /proc/sys/kernel/random/uuid > /app/drawn"
    ref = write_task(
        tmp_path,
        "once",
        setup=f"mkdir -p /app; {draw}; rm -rf /usr/share/perl5",
        test=(
            "test ! -e /usr/share/perl5 && cmp /app/drawn /app/copy "
            "&& echo 1 > /logs/verifier/reward.txt"
        ),
    )
    import_folder("once", tmp_path)
    turns = ["cd /app; cat drawn; cp drawn copy", "submit"]
    line.server.play({"marker": marker("once"), "turns": turns})

    rollouts = line.submit(line.experiment("once"), [ref], samples=16)
    done = line.wait_done(rollouts, seconds=240)

    assert [(r["outcome"], r["reward"]) for r in done] == [("scored", 1.0)] * 16
    assert len({said(line, rollout)[0] for rollout in rollouts}) == 1
    layers = line.sql("SELECT layers FROM sandboxes_sandbox WHERE owner = ANY(%s)", rollouts)
    assert len({str(row[0][-1:]) for row in layers}) == 1


def test_a_failing_setup_tells_what_it_said(
    line: Line, import_folder: ImportFolder, tmp_path: Path
) -> None:
    ref = write_task(tmp_path, "fails", setup="echo the mirror is down >&2; exit 4")
    import_folder("fails", tmp_path)

    (rollout,) = line.wait_done(line.submit(line.experiment("fails", max_attempts=1), [ref]))

    assert (rollout["outcome"], rollout["failure_code"]) == ("infra_failed", "sandbox.setup_failed")
    assert "the mirror is down" in rollout["failure_detail"]
    wait_until(lambda: line.sandboxes_left([rollout["id"]]) == 0, "the removal")


def test_a_warm_sandbox_is_used_and_replaced(
    line: Line, import_folder: ImportFolder, environment: Callable[..., str], tmp_path: Path
) -> None:
    def ahead() -> set[str]:
        instances = line.stack.var_dir / "node" / "instances"
        return {
            path.parent.name
            for path in instances.glob("*-warm-*/record.json")
            if '"ready": true' in path.read_text()
        }

    ref = write_task(tmp_path, "warm")
    environment("warm", warm=2)
    import_folder("warm", tmp_path, "warm")
    line.server.play({"marker": marker("warm"), "turns": ["hostname", "submit"]})
    first = wait_until(lambda: (found := ahead()) and len(found) == 2 and found, "two warm ones")

    (rollout,) = line.wait_done(line.submit(line.experiment("warm"), [ref]))

    assert (rollout["outcome"], rollout["reward"]) == ("scored", 1.0)
    wait_until(lambda: len(ahead()) == 2 and ahead() != first, "another in its place")
    environment("warm", warm=0)
    wait_until(lambda: not ahead(), "the end of the pool")


def test_an_episode_is_branched_at_a_turn(
    line: Line, import_folder: ImportFolder, tmp_path: Path
) -> None:
    ref = write_task(
        tmp_path,
        "branch",
        setup="mkdir -p /app; echo setup > /app/log",
        test="cp /app/log /logs/verifier/log; echo 1 > /logs/verifier/reward.txt",
    )
    import_folder("branch", tmp_path)
    turns = ["cd /app; echo one >> log; sleep 3", "echo two >> log", "cat log", "submit"]
    line.server.play({"marker": marker("branch"), "turns": turns})
    experiment = line.experiment("branch")
    (first,) = line.submit(experiment, [ref])
    asked = line.trainer.call("POST", f"/rollouts/{first}/snapshots/", {"turn": 1})
    line.wait_done([first])
    assert "setup\none\ntwo" in said(line, first)[2]

    kept: JSON = line.trainer.call("GET", f"/snapshots/{asked['id']}/")
    assert (kept["state"], kept["turn"], kept["workdir"]) == ("ready", 1, "/app")
    line.server.play({"marker": marker("branch"), "turns": ["cat /app/log", "submit"]})
    groups = [{"task_ref": ref, "samples": 2, "snapshot": asked["id"]}]
    answer = line.trainer.call("POST", f"/experiments/{experiment}/groups/", {"groups": groups})
    branches = [rollout for group in answer["groups"] for rollout in group["rollouts"]]
    done = line.wait_done(branches)

    assert {(r["outcome"], r["reward"]) for r in done} == {("scored", 1.0)}
    for branch in branches:
        assert said(line, branch)[0].startswith("setup\none\n[")
    with pytest.raises(ServiceRefused, match="409"):
        line.trainer.call("POST", f"/rollouts/{first}/snapshots/")
    line.trainer.call("DELETE", f"/snapshots/{asked['id']}/")
    with pytest.raises(ServiceRefused, match="404"):
        line.trainer.call("GET", f"/snapshots/{asked['id']}/")


def test_what_an_agent_plants_is_no_reward(
    line: Line, import_folder: ImportFolder, tmp_path: Path
) -> None:
    ref = write_task(tmp_path, "plant", test="echo 0.25 > /logs/verifier/reward.txt")
    import_folder("plant", tmp_path)
    plant = (
        "mkdir -p /logs/verifier; echo '{\"reward\": 1}' > /logs/verifier/reward.json; "
        "ln -sf /bin/true /usr/local/sbin/rm; rm -rf /tests; ln -s /app /tests"
    )
    line.server.play({"marker": marker("plant"), "turns": [plant, "submit"]})

    (rollout,) = line.wait_done(line.submit(line.experiment("plant"), [ref]))

    assert (rollout["outcome"], rollout["reward"]) == ("scored", 0.25)


@pytest.mark.parametrize("broken", ["tar", "sh", "mkdir"])
def test_an_agent_that_breaks_its_system_pays_for_it(
    line: Line, import_folder: ImportFolder, tmp_path: Path, broken: str
) -> None:
    name = f"brick-{broken}"
    ref = write_task(tmp_path, name, evaluator=WHOLE)
    import_folder(name, tmp_path)
    line.server.play({"marker": marker(name), "turns": [f"rm -f /bin/{broken}", "submit"]})
    experiment = line.experiment(name, failure_reward=-1.0)

    (rollout,) = line.wait_done(line.submit(experiment, [ref]), seconds=180)

    assert (rollout["outcome"], rollout["reward"]) == ("scored", -1.0)


def test_the_model_is_all_that_a_model_only_sandbox_reaches(
    line: Line, import_folder: ImportFolder, environment: Callable[..., str], tmp_path: Path
) -> None:
    ref = write_task(tmp_path, "model-only")
    environment("model-only", network="model_only")
    import_folder("model-only", tmp_path, "model-only")
    get = (
        "python3 -c 'import os,urllib.request as u; "
        'print(u.urlopen(os.environ["OPENAI_BASE_URL"] + "/models").read().decode())\''
    )
    other = (
        f"python3 -c 'import socket; socket.create_connection((\"127.0.0.1\", {line.server.port}))'"
    )
    line.server.play({"marker": marker("model-only"), "turns": [get, other, "submit"]})

    (rollout,) = line.wait_done(line.submit(line.experiment("model-only"), [ref]))

    answers = said(line, rollout["id"])
    assert '"object"' in answers[0], answers
    assert "ConnectionRefusedError" in answers[1]


@pytest.fixture
def site() -> Iterator[int]:
    """Serve a page on loopback; yields the port."""

    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "6")
            self.end_headers()
            self.wfile.write(b"a page")

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def test_listed_hosts_are_all_that_an_allow_list_reaches(
    line: Line,
    import_folder: ImportFolder,
    environment: Callable[..., str],
    tmp_path: Path,
    site: int,
) -> None:
    fetch = (
        "python3 -c 'import urllib.request as u; print(u.urlopen(\"http://127.0.0.1:{}/\").read())'"
    )
    ref = write_task(
        tmp_path,
        "listed",
        setup=f"unset no_proxy; mkdir -p /app; {fetch.format(site)} > /app/fetched",
    )
    environment("listed", network="allow_list", egress_hosts=[f"127.0.0.1:{site}"])
    import_folder("listed", tmp_path, "listed")
    turns = ["unset no_proxy; cat /app/fetched", fetch.format(site), fetch.format(site + 1)]
    line.server.play({"marker": marker("listed"), "turns": [*turns, "submit"]})

    (rollout,) = line.wait_done(line.submit(line.experiment("listed"), [ref]))

    answers = said(line, rollout["id"])
    assert answers[0].startswith("b'a page'"), answers
    assert answers[1].startswith("b'a page'"), answers
    assert "HTTP Error 403" in answers[2], answers


def test_a_hog_of_memory_without_control_groups_harms_neither_worker_nor_database(
    line: Line, import_folder: ImportFolder, environment: Callable[..., str], tmp_path: Path
) -> None:
    processes = line.stack.started()
    processes.kill("init")
    processes.start("init", PRORL_CGROUPS="none")
    line.stack.wait_ready()
    workers = {name: processes.running[name].pid for name in ("init", "run", "eval")}
    hog = "python3 -c \"x = [b'x' * (1 << 20) for _ in iter(int, 1)]\""
    refs = [write_task(tmp_path, "hog"), write_task(tmp_path, "calm")]
    environment("bounded", limits={"memory_bytes": 512 * 1024**2})
    import_folder("hog", tmp_path, "bounded")
    line.server.play(
        {"marker": marker("hog"), "turns": [hog, "submit"]},
        {"marker": marker("calm"), "turns": ["sleep 10", "sleep 1", "submit"]},
    )
    assert line.stack.engines is not None
    url = line.stack.engines.database_url(line.stack.database)
    with psycopg.connect(url, autocommit=True) as session:
        backend = session.info.backend_pid
        hungry, calm = line.submit(line.experiment("hog", failure_reward=-1.0), refs)
        line.wait_running(calm, "run")
        records = (line.stack.var_dir / "node" / "instances").glob("*/record.json")
        kept = [json.loads(path.read_text()) for path in records]
        scores = {
            pid: int(Path(f"/proc/{pid}/oom_score_adj").read_text())
            for pid in (backend, *workers.values(), *(record["pid"] for record in kept))
        }
        done = {r["id"]: r for r in line.wait_done([hungry, calm])}
        alive = session.execute("SELECT pg_backend_pid()").fetchone()

    assert kept
    assert all(record["cgroups"] == {} for record in kept)
    for record in kept:
        assert scores[record["pid"]] > max(scores[backend], *(scores[w] for w in workers.values()))
    ended = done[hungry]
    assert (ended["outcome"], ended["reward"]) == ("scored", -1.0)
    assert (ended["stop_reason"], ended["restarts"]) == ("sandbox_limit", 0)
    assert line.trajectory(hungry)["agent"]["over_limit"] == "memory"
    assert (done[calm]["outcome"], done[calm]["reward"]) == ("scored", 1.0)
    assert alive == (backend,)
    assert {name: processes.running[name].poll() for name in workers} == dict.fromkeys(workers)
    processes.kill("init")  # the next test finds one as the others are


# In several files: one alone may be no larger than the disk.
FILL = "for n in $(seq 20); do head -c 32M /dev/zero > /var/tmp/$n; done; sleep 60"


@pytest.mark.parametrize(
    ("agent", "turn"),
    [("command_line", FILL), ("bash_block", f"Now.\n```bash\n{FILL}\n```")],
)
def test_a_policy_that_fills_its_disk_is_scored_at_its_first_try(
    line: Line,
    import_folder: ImportFolder,
    environment: Callable[..., str],
    tmp_path: Path,
    agent: str,
    turn: str,
) -> None:
    name = f"fill-{agent}"
    ref = write_task(tmp_path, name)
    environment(name, agent=agent, limits={"disk_bytes": 64 * 1024**2})
    import_folder(name, tmp_path, name)
    line.server.play({"marker": marker(name), "turns": [turn, "submit"]})
    experiment = line.experiment(name, failure_reward=-1.0)

    (rollout,) = line.wait_done(line.submit(experiment, [ref]), seconds=180)

    assert (rollout["outcome"], rollout["reward"]) == ("scored", -1.0)
    assert (rollout["stop_reason"], rollout["turns"], rollout["restarts"]) == (
        "sandbox_limit",
        1,
        0,
    )
    assert "failed" not in [each["state"] for each in line.attempts(rollout["id"])]
    trajectory = line.trajectory(rollout["id"])
    assert trajectory["agent"]["over_limit"] == "disk"
    (segment,) = trajectory["segments"]
    assert sum(segment["response_mask"]) == rollout["sampled_tokens"] > 0


def test_a_sandbox_that_ends_behind_the_agents_back_is_graded_as_it_was_left(
    line: Line, import_folder: ImportFolder, environment: Callable[..., str], tmp_path: Path
) -> None:
    ref = write_task(
        tmp_path,
        "behind",
        test="test -e /var/tmp/1 && cp /app/work /logs/verifier/reward.txt",
        evaluator=WHOLE,
    )
    environment("behind", limits={"disk_bytes": 64 * 1024**2})
    import_folder("behind", tmp_path, "behind")
    turns = [
        f"mkdir -p /app; echo 0.75 > /app/work; (sleep 1; {FILL}) > /dev/null 2>&1 &",
        {"text": "submit", "delay_seconds": 10},
    ]
    line.server.play({"marker": marker("behind"), "turns": turns})
    experiment = line.experiment("behind", failure_reward=-1.0)
    instances = line.stack.var_dir / "node" / "instances"

    rollouts = line.submit(experiment, [ref])
    wait_until(lambda: list(instances.glob("*/ended.json")), "the end at the limit")
    (rollout,) = line.wait_done(rollouts, seconds=180)

    assert (rollout["stop_reason"], rollout["restarts"]) == ("finished", 0)
    assert (rollout["outcome"], rollout["reward"]) == ("scored", 0.75)


def test_nothing_is_left_after_every_worker_was_killed(
    line: Line, import_folder: ImportFolder, tmp_path: Path
) -> None:
    def counted() -> tuple[int, int, list[str]]:
        """Count instances by process and by folder, and mounts below the node's folder."""
        node = line.stack.var_dir / "node"
        processes = [p.info["name"] for p in psutil.process_iter(["name"])]
        mounts = [m for m in Path("/proc/mounts").read_text().splitlines() if str(node) in m]
        folders = len(list((node / "instances").iterdir()))
        return processes.count("appinit"), folders, mounts

    ref = write_task(tmp_path, "killed")
    import_folder("killed", tmp_path)
    line.server.play({"marker": marker("killed"), "turns": ["(setsid sleep 600 &); sleep 30"] * 8})
    wait_until(lambda: counted()[1] == 0, "an empty node")
    before = counted()
    rollouts = line.submit(line.experiment("killed", max_attempts=1), [ref], samples=16)

    def in_run() -> bool:
        rows = line.sql(
            "SELECT count(*) FROM rollouts_attempt WHERE rollout_id = ANY(%s) AND stage = 'run' "
            "AND state = 'running'",
            rollouts,
        )
        return bool(rows[0][0] == 16)

    wait_until(in_run, "sixteen rollouts in RUN", 180)
    assert counted()[1] == 16
    for name in ("init", "run", "eval"):
        line.stack.started().kill(name)
    line.ensure_up()
    done = line.wait_done(rollouts, seconds=180)

    assert {r["outcome"] for r in done} == {"infra_failed"}
    wait_until(lambda: counted() == before, "the same counts as before", 120)
    assert line.sandboxes_left(rollouts) == 0
    metrics = httpx.get(
        f"{line.stack.url}/metrics",
        headers={"Authorization": f"Bearer {line.trainer.token}"},
        timeout=10,
    )
    assert "prorl_sandboxes_leaked_total{" in metrics.text
