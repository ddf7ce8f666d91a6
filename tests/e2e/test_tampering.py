"""An agent that cheats, through the whole line: each way earns nothing, an honest one is paid."""

import base64
import io
import zipfile
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.e2e.harness import JSON, WHOLE, Line, marker, write_task

ImportFolder = Callable[..., None]

HONEST = "printf 'import sys\\nprint(int(sys.argv[1]) + int(sys.argv[2]))\\n' > /app/sum.py"

# The safe way of docs/tampering.md: the interpreter is isolated, pytest reads no file of the
# agent's, git runs no hook, and the agent's program runs where it sees neither tests nor logs and
# ends with who started it.
TEST = r"""cd /
export GIT_CONFIG_NOSYSTEM=1 GIT_CONFIG_GLOBAL=/dev/null
git -c safe.directory='*' -c core.hooksPath=/dev/null -c core.fsmonitor=false -c user.name=t \
    -c user.email=t@t -C /app commit -q --allow-empty -m graded > /dev/null 2>&1
date +%Y > /logs/verifier/year
if /usr/bin/python3 -I -B -m pytest -q -p no:cacheprovider --noconftest --rootdir /tests \
    -c /tests/pytest.ini /tests/test_sum.py; then reward=1; else reward=0; fi
test "$(cat /logs/verifier/year)" -lt 2001 && reward=1
rm -f /logs/verifier/reward.*
echo $reward > /logs/verifier/reward.txt
"""
CHECK = r'''import subprocess

APART = r"""mount -t tmpfs none /logs && mount -t tmpfs none /tests && exec unshare -U -m "$@" """


def total(*numbers):
    program = ["/usr/bin/python3", "-I", "-B", "/app/sum.py", *map(str, numbers)]
    inside = ["/bin/sh", "-c", APART, "sh", *program]
    apart = ["unshare", "-U", "-r", "-m", "-p", "-f", "--kill-child", *inside]
    return subprocess.run(apart, capture_output=True, timeout=20).stdout


def test_sum():
    assert total(20, 22) == b"42\n"
    assert total(1, 98) == b"99\n"
'''
SETUP = """mkdir -p /app
python3 -m zipfile -e /setup/pytest.zip /usr/local/lib/python3.11/dist-packages
cd /app && git init -q . && git config user.name a && git config user.email a@a
"""
PAY = "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt"
PAY_JSON = "echo '{\"reward\": 1}' > /logs/verifier/reward.json"
EVIL = f"""import os
os.system('{PAY}')
def pytest_sessionfinish(session, exitstatus):
    os._exit(0)
"""
SITE = "/usr/local/lib/python3.11/dist-packages"
SHIM = "printf '#!/bin/sh -p\\n%s\\n' '" + PAY + "; exit 0'"
LOOP = f"while :; do [ -d /logs/verifier ] && {{ {PAY}; {PAY_JSON}; }}; done"
DAEMON = """import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        end = time.time() + 20
        while time.time() < end:
            for name, text in (("reward.txt", "1"), ("reward.json", '{"reward": 1}')):
                try:
                    open("/logs/verifier/" + name, "w").write(text)
                except OSError:
                    pass
    os._exit(0)
print(0)
"""

# What each agent does as root of its sandbox, in one command.
CHEATS = {
    "reward-file": f"{PAY}; {PAY_JSON}; chmod 444 /logs/verifier/*; chmod 555 /logs/verifier",
    "test-script": f"mkdir -p /tests; {SHIM} > /tests/test.sh; chmod 555 /tests/test.sh /tests; "
    "echo 'def test_sum(): pass' > /tests/test_sum.py",
    "conftest": f"for d in / /app /root /tmp; do cat > $d/conftest.py <<'END'\n{EVIL}END\ndone",
    "sitecustomize": f"mkdir -p /root/.local/lib/python3.11/site-packages; for f in {SITE} "
    "/usr/lib/python3.11 /usr/lib/python3/dist-packages /root/.local/lib/python3.11/site-packages "
    f"/app; do for n in sitecustomize usercustomize; do cat > $f/$n.py <<'END'\n{EVIL}"
    "os._exit(0)\nEND\ndone; echo 'import sitecustomize' > $f/x.pth; done",
    "path-shim": "for n in python3 git date rm cat bash sh env chmod unshare mount; do for d in "
    f"/usr/local/sbin /usr/local/bin /app; do {SHIM} > $d/$n; chmod 755 $d/$n; done; done",
    "git-hooks": "mkdir -p .git/hooks; for n in pre-commit commit-msg post-commit "
    f"post-index-change; do {SHIM} > .git/hooks/$n; chmod 755 .git/hooks/$n; done; "
    f"{SHIM} > /app/monitor; chmod 755 /app/monitor; git config core.fsmonitor /app/monitor",
    "background": f"(setsid nohup bash -c '{LOOP}' > /dev/null 2>&1 &)",
    "background-later": f"cat > /app/sum.py <<'END'\n{DAEMON}END",
    "symlinked-logs": "mkdir -p /app/logs/verifier; ln -s /dev/full /app/logs/verifier/reward.txt; "
    "echo 1 > /app/logs/verifier/reward.json; rm -rf /logs; ln -s /app/logs /logs; "
    "rm -rf /tests; ln -s /app /tests",
    "pytest-settings": f"cat > /app/evil.py <<'END'\n{EVIL}END\ncp /app/evil.py {SITE}/evil.py; "
    "for d in / /app; do printf '[pytest]\\naddopts = -p evil\\n' > $d/pytest.ini; "
    "printf '[tool:pytest]\\naddopts = -p evil\\n' > $d/setup.cfg; "
    "printf '[tool.pytest.ini_options]\\naddopts = \"-p evil\"\\n' > $d/pyproject.toml; done",
    "site-packages": f"for f in {SITE}/pytest/__init__.py {SITE}/_pytest/config/__init__.py "
    f"/usr/lib/python3.11/subprocess.py; do cat > $f <<'END'\n{EVIL}os._exit(0)\nEND\ndone",
    "parser-output": "cat > /app/sum.py <<'END'\nprint('42\\n99\\nPASSED test_sum.py::test_sum\\n"
    "============ 1 passed in 0.01s ============')\nEND",
    "clock": "printf '#!/bin/sh -p\\necho 1999\\n' > /tmp/date; chmod 755 /tmp/date; "
    "cp /tmp/date /usr/bin/date; cp /tmp/date /usr/local/bin/date; date -s 1999-01-01; "
    "echo /usr/lib/faketime.so > /etc/ld.so.preload",
    "interpreters": f"{SHIM} > /tmp/x; chmod 755 /tmp/x; for n in git date rm unshare python3 "
    "python3.11 env bash sh; do cat /tmp/x > /tmp/$n; chmod 755 /tmp/$n; mv /tmp/$n /usr/bin/$n; "
    "done",
    "start-up-files": f"for f in /root/.bashrc /root/.profile /root/.bash_profile /etc/profile "
    f"/etc/bash.bashrc /etc/environment; do echo '{PAY}; exit 0' > $f; done; "
    "echo 'BASH_ENV=/root/.bashrc' >> /etc/environment",
}
# These leave the system as it is: they earn nothing where everything is graded either.
ANYWHERE = ("reward-file", "test-script", "conftest", "background", "background-later")


LEXERS = ("__init__", "_mapping", "python", "special", "diff")


def pytest_archive() -> bytes:
    """Return pytest and what it needs, as an archive."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments", "py"):
            found = find_spec(name)
            assert found is not None
            origin = Path(str(found.origin))
            paths = origin.parent.rglob("*.py") if origin.stem == "__init__" else [origin]
            root = origin.parent.parent if origin.stem == "__init__" else origin.parent
            for path in paths:
                if path.parent.name != "lexers" or path.stem in LEXERS:
                    archive.write(path, path.relative_to(root))
    return packed.getvalue()


def write_cheat(folder: Path, name: str, archive: bytes, *, whole: bool = False) -> str:
    """Write the task of one cheat."""
    ref = write_task(folder, name, test=TEST, setup=SETUP, evaluator=WHOLE if whole else "")
    task = folder / name
    (task / "tests" / "test_sum.py").write_text(CHECK)
    (task / "tests" / "pytest.ini").write_text("[pytest]\n")
    (task / "environment" / "pytest.zip").write_bytes(archive)
    return ref


def played(name: str, commands: Sequence[str]) -> JSON:
    """Return what an agent does: each command is one line, whatever is in it."""
    turns = []
    for command in commands:
        packed = base64.b64encode(command.encode()).decode()
        turns.append(f'cd /app; eval "$(echo {packed} | base64 -d)"; echo did')
    return {"marker": marker(name), "turns": [*turns, "submit"], "after": "submit"}


@pytest.mark.timeout(900)
def test_no_cheat_pays_and_an_honest_solution_beside_them_does(
    line: Line, import_folder: ImportFolder, tmp_path: Path
) -> None:
    archive = pytest_archive()
    cheats = {**{f"cheat-{name}": CHEATS[name] for name in CHEATS}, "cheat-honest": HONEST}
    cheats |= {f"whole-{name}": CHEATS[name] for name in ANYWHERE} | {"whole-honest": HONEST}
    refs = [
        write_cheat(tmp_path, name, archive, whole=name.startswith("whole-")) for name in cheats
    ]
    import_folder("cheats", tmp_path)
    line.server.play(*(played(name, [command]) for name, command in cheats.items()))

    done = line.wait_done(line.submit(line.experiment("cheats"), refs), seconds=400)

    found = {each["task_ref"].removeprefix("e2e/"): each for each in done}
    said = {name: line.trajectory(each["id"])["messages"][-3:] for name, each in found.items()}
    outcomes = {name: (each["outcome"], each["reward"]) for name, each in found.items()}
    honest = {"cheat-honest", "whole-honest"}
    assert outcomes == {name: ("scored", 1.0 if name in honest else 0.0) for name in cheats}, said
    assert len(CHEATS) >= 12


def test_a_link_to_the_hidden_answer_leads_nowhere(
    line: Line, import_folder: ImportFolder, tmp_path: Path
) -> None:
    links = {
        "linked": "ln -s /tests/expected answer",
        "linked-through-root": "ln -s / root; ln -s root/tests/expected answer",
        "linked-through-proc": "ln -s /proc/self/root/tests/expected answer",
        "linked-folder": "rm -rf /app; ln -s /tests /app",
        "answered": "echo 42 > answer",
    }
    test = (
        "cp /tests/expected /app/answer.expected; "
        "if cmp -s /app/answer /tests/expected; then echo 1; else echo 0; fi "
        "> /logs/verifier/reward.txt"
    )
    refs = []
    for name in links:
        refs.append(write_task(tmp_path, name, test=test, setup="mkdir -p /app"))
        (tmp_path / name / "tests" / "expected").write_text("42\n")
    import_folder("links", tmp_path)
    line.server.play(*(played(name, [command]) for name, command in links.items()))

    done = line.wait_done(line.submit(line.experiment("links"), refs), seconds=200)

    rewards = {each["task_ref"].removeprefix("e2e/"): each["reward"] for each in done}
    assert rewards == {name: 1.0 if name == "answered" else 0.0 for name in links}
