"""`make demo` as a newcomer runs it, and Ctrl-C in the middle of it."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from prorl_site.stack.processes import ROOT
from tests.e2e.conftest import BASE_IMAGE
from tests.e2e.harness import wait_until


@pytest.fixture(scope="module")
def model_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a cache that the demos share: only the first one prepares the model's weights."""
    return tmp_path_factory.mktemp("demo-cache")


@pytest.fixture
def var_folder(model_cache: Path) -> Iterator[Path]:
    """Return a folder that other accounts may pass."""
    with tempfile.TemporaryDirectory(prefix="prorl-demo-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "cache").symlink_to(model_cache)
        yield folder


def start_demo(var: Path, *arguments: str) -> subprocess.Popen[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PRORL_")}
    for name in ("DATABASE_URL", "BROKER_URL", "DJANGO_SETTINGS_MODULE"):
        environment.pop(name, None)
    with (var / "output").open("w") as stream:
        return subprocess.Popen(
            [sys.executable, "-m", "examples.demo", "--var", str(var), *arguments],
            cwd=ROOT,
            env={**environment, "PRORL_IMAGE_ROOT": str(BASE_IMAGE.parent)},
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            text=True,
        )


def output(var: Path) -> str:
    return (var / "output").read_text()


def what_is_left(var: Path) -> list[str]:
    """Return processes and mounts that name the demo's folder, and instances in it."""
    left = []
    for process in psutil.process_iter():
        try:
            words = [*process.cmdline(), *process.environ().values(), process.cwd()]
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        if any(str(var) in word for word in words):
            left.append(f"process {process.pid} {process.cmdline()}")
    left += [
        f"mount {text}"
        for text in Path("/proc/mounts").read_text().splitlines()
        if str(var) in text
    ]
    for folder in ("instances", "layers"):
        path = var / "node" / folder
        found = path.iterdir() if path.is_dir() else []
        # What setups left is a cache: it stays for the next start.
        left += [f"{folder} {each}" for each in found if not each.name.startswith("prepared-")]
    return left


def test_the_demo_ends_0_and_leaves_nothing_running(var_folder: Path) -> None:
    demo = start_demo(var_folder)

    assert demo.wait(timeout=280) == 0, output(var_folder)

    summary = json.loads((var_folder / "demo" / "summary.json").read_text())
    assert summary["states"] == {"done": 24}
    assert summary["outcomes"] == {"scored": 24}
    assert summary["rollouts_with_tool_calls"] > 0
    assert summary["sandboxes_that_ran_a_command"] == summary["rollouts_with_tool_calls"]
    assert "--- assistant ---" in (var_folder / "demo" / "trajectory.txt").read_text()
    assert "demo/make-file" in output(var_folder)
    assert what_is_left(var_folder) == []


@pytest.mark.parametrize(
    "moment", ["starting PostgreSQL", "experiment demo-", "rollouts under way"]
)
def test_ctrl_c_leaves_no_process_no_mount_no_instance(var_folder: Path, moment: str) -> None:
    demo = start_demo(var_folder)
    if moment == "starting PostgreSQL":
        wait_until(lambda: (var_folder / "postgres").is_dir(), moment)
    elif moment == "rollouts under way":
        instances = var_folder / "node" / "instances"
        wait_until(lambda: instances.is_dir() and any(instances.iterdir()), moment, 200)
    else:
        wait_until(lambda: moment in output(var_folder), moment, 200)

    demo.send_signal(signal.SIGINT)

    assert demo.wait(timeout=90) == 130, output(var_folder)
    wait_until(lambda: what_is_left(var_folder) == [], f"the end: {what_is_left(var_folder)}", 15)


def test_a_demo_after_a_killed_one_cleans_up_and_passes(var_folder: Path) -> None:
    demo = start_demo(var_folder)
    wait_until(lambda: "experiment demo-" in output(var_folder), "the experiment", 200)
    demo.kill()
    demo.wait()

    again = start_demo(var_folder)

    assert again.wait(timeout=280) == 0, output(var_folder)
    assert what_is_left(var_folder) == []
