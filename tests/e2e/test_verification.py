"""Environments verified over the whole line, with real sandboxes, and the page that says how."""

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from examples.demo.trainer import ServiceRefused
from prorl_site.stack.processes import ROOT
from tests.e2e.harness import JSON, Line, marker, wait_until, write_task

ImportFolder = Callable[..., None]
PAGE = (ROOT / "docs" / "environments.md").read_text(encoding="utf-8")
# An answer that is right only once, by a folder that no sandbox can see from inside.
RIGHT = (
    "test -f /app/done && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt"
)


def solve(folder: Path, name: str, script: str) -> None:
    """Give a task of the harness a solution."""
    (folder / name / "solution").mkdir()
    (folder / name / "solution" / "solve.sh").write_text(f"#!/bin/bash\n{script}\n")


def environment(line: Line, name: str, **values: Any) -> JSON:
    """Make an environment over the base image."""
    body = {"name": name, "image": "base", "tools": ["bash", "submit"], **values}
    return dict(line.operator.call("POST", "/environments/", body))


def begin(line: Line, made: JSON, **values: Any) -> JSON:
    """Begin a verification."""
    return dict(line.operator.call("POST", f"/environments/{made['id']}/verifications/", values))


def ended(line: Line, begun: JSON) -> JSON:
    """Return a verification once it has ended."""

    def over() -> JSON | None:
        found = line.operator.call("GET", f"/verifications/{begun['id']}/")
        return found if found["state"] != "running" else None

    found: JSON = wait_until(over, "the end of a verification", 120)
    return found


def test_what_works_is_verified_what_does_not_is_broken_and_refused(
    line: Line, import_folder: ImportFolder, tmp_path: Path
) -> None:
    # given: one environment whose task pays its solution, and one whose grader pays nobody
    tool = {"tool": {"base64": "IyEvYmluL3NoCnRvdWNoICIkMSIK", "mode": 0o755}}  # touch "$1"
    good = environment(line, "verify-good", setup="cp /setup/tool /usr/local/bin/mark", files=tool)
    bad = environment(line, "verify-bad")
    for name, test, script in (
        ("good", RIGHT, "mark done; echo solved in $PWD"),
        ("bad", "echo 0 > /logs/verifier/reward.txt; echo the test says no", "touch done"),
    ):
        folder = tmp_path / f"set-{name}"
        write_task(folder, f"verify-{name}", test=test, setup="test -x /setup/tool || true")
        solve(folder, f"verify-{name}", script)
        import_folder(f"verify-{name}", folder, f"verify-{name}")

    # when
    begun = [begin(line, good), begin(line, bad)]
    with pytest.raises(ServiceRefused, match=r"verification\.running"):
        begin(line, good)
    found, other = (ended(line, each) for each in begun)

    # then
    (task,) = found["report"]["tasks"]
    assert (found["verdict"], task["state"]) == ("verified", "passed"), found["report"]
    assert set(task["checks"].values()) == {"passed"}
    assert task["rewards"] == {"oracle": [1.0, 1.0], "noop": [0.0, 0.0]}
    assert set(found["report"]["seconds"]) == {"init", "run", "eval"}
    assert found["rollouts_done"] == found["rollouts"] == 4

    (task,) = other["report"]["tasks"]
    assert (other["verdict"], task["checks"]["solution"]) == ("broken", "failed")
    assert "the test says no" in task["log"]

    shown = line.operator.call("GET", f"/environments/{bad['id']}/")
    assert shown["verification"] == "broken"
    with pytest.raises(ServiceRefused, match=r"environment\.broken"):
        line.experiment("verify-bad")
    line.server.play({"marker": marker("verify-bad"), "turns": ["submit"]})
    forced = line.submit(line.experiment("verify-bad", force=True), ["e2e/verify-bad"])
    (rollout,) = line.wait_done(forced)
    assert rollout["outcome"] == "scored"

    # and: nothing of it reaches a trainer, no sandbox is left
    experiments = line.operator.all_pages("/experiments/?page_size=100")
    assert not [each for each in experiments if each["purpose"] == "verification"]
    rollouts = [each for role in task["rollouts"].values() for each in role]
    wait_until(lambda: line.sandboxes_left(rollouts) == 0, "the sandboxes' end", 30)


def test_a_run_worker_killed_over_a_solution_costs_only_time(
    line: Line, import_folder: ImportFolder, tmp_path: Path
) -> None:
    # given: a solution that must not run twice in one sandbox
    made = environment(line, "verify-killed")
    write_task(tmp_path, "verify-killed", test=RIGHT)
    solve(tmp_path, "verify-killed", "mkdir once || exit 1\nsleep 6\ntouch done")
    import_folder("verify-killed", tmp_path, "verify-killed")
    begun = begin(line, made, repeats=1)
    rows = line.sql(
        "SELECT rollout.id FROM rollouts_rollout AS rollout JOIN rollouts_verification AS own "
        "ON own.experiment_id = rollout.experiment_id JOIN rollouts_group AS g "
        "ON g.id = rollout.group_id WHERE own.id = %s AND g.metadata->>'verification' = 'oracle'",
        begun["id"],
    )
    oracle = str(rows[0][0])
    line.operator.call("GET", f"/rollouts/{oracle}/")

    def running() -> Any:
        return line.sql(
            "SELECT id FROM rollouts_attempt WHERE rollout_id = %s AND stage = 'run' "
            "AND state = 'running' AND started_at < now() - interval '1.5 seconds'",
            oracle,
        )

    wait_until(running, "the solution under way")

    # when
    line.stack.started().kill("run")
    line.stack.start("run")

    # then
    found = ended(line, begun)
    assert found["verdict"] == "verified", found["report"]
    lost = line.sql(
        "SELECT count(*) FROM rollouts_attempt WHERE rollout_id = %s AND state = 'lost'", oracle
    )
    assert lost[0][0] >= 1


def test_secrets_are_given_and_never_kept(
    line: Line, import_folder: ImportFolder, tmp_path: Path
) -> None:
    # given: an environment whose setup and shell get a secret, and one that bakes it in
    value = line.stack.settings["PRORL_SECRET_E2E"]
    secrets = {"E2E_TOKEN": {"from": "env:E2E", "to": ["setup", "tools"]}}
    digest = 'printf %s "$E2E_TOKEN" | sha256sum | cut -c1-12'
    environment(
        line, "verify-secret", setup=f"{digest} > /setup-saw", secrets=secrets, agent="command_line"
    )
    ref = write_task(
        tmp_path, "verify-secret", test="cp /app/saw /logs/verifier/reward.txt 2>/dev/null"
    )
    import_folder("verify-secret", tmp_path, "verify-secret")
    turns = [
        "export E2E_TOKEN; echo token is $E2E_TOKEN; cp /setup-saw same",
        f'[ "$({digest})" = "$(cat same)" ] && echo 1 > saw',
        "submit",
    ]
    line.server.play({"marker": marker("verify-secret"), "turns": turns})

    # when
    (rollout,) = line.wait_done(line.submit(line.experiment("verify-secret"), [ref]))

    # then
    assert (rollout["outcome"], rollout["reward"]) == ("scored", 1.0), rollout
    said = [each["content"] for each in line.trajectory(rollout["id"])["messages"]]
    assert any("token is [secret E2E_TOKEN]" in each for each in said)
    baked = environment(line, "verify-baked", setup="echo $E2E_TOKEN > /kept", secrets=secrets)
    found = ended(line, begin(line, baked, task_set="verify-secret", repeats=1))
    (task,) = found["report"]["tasks"]
    assert (found["verdict"], task["checks"]["setup"]) == ("broken", "failed")
    assert "left a secret in /kept" in task["detail"]
    missing = {"GONE": {"from": "env:GONE", "to": ["tools"]}}
    lacks = environment(line, "verify-lacks", secrets=missing)
    found = ended(line, begin(line, lacks, task_set="verify-secret", repeats=1))
    (task,) = found["report"]["tasks"]
    assert task["detail"].startswith("secret.missing: Node ")
    kept = line.sql(
        "SELECT count(*) FROM rollouts_journalentry WHERE body::text LIKE %s", f"%{value}%"
    )
    assert kept == [(0,)]
    for path in line.stack.var_dir.rglob("*"):
        if path.is_file() and path.suffix in (".log", ".json"):
            assert value not in path.read_text(errors="replace"), path


def test_the_environment_of_the_page_is_verified(line: Line, tmp_path: Path) -> None:
    # given: the files of the page, each named behind its language
    for name, text in re.findall(r"^```\w+ (\S+)\n(.*?)^```$", PAGE, re.S | re.M):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (commands,) = re.findall(r"^```sh\n(.*?)^```$", PAGE, re.S | re.M)

    # when
    said = []
    for command in commands.splitlines():
        python, script, *words = shlex.split(command)
        assert (python, script) == ("python", "manage.py")
        known = [str(tmp_path / each) if (tmp_path / each).exists() else each for each in words]
        said.append(line.stack.manage(*known))

    # then
    assert said[0] == "environment counting@1\n"
    assert said[2].splitlines()[-1] == "counting@1: verified"
    exported = line.stack.manage("export_environment", "counting")
    (tmp_path / "again.toml").write_text(exported)
    again = line.stack.manage("import_environment", str(tmp_path / "again.toml"))
    assert again == "environment counting@1\n"
    assert exported.startswith("# Environment counting@1;")
