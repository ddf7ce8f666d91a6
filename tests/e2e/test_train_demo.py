"""`make train-demo` as a newcomer runs it; its tasks; what it says of weights that do not agree."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest

from examples.tiny_server.weights import load_weights
from examples.train_demo import boxes
from examples.train_demo.__main__ import STEPS, TRAINER
from examples.train_demo.verdict import ENDS, MAX_DIFFERENCE, MEAN_DIFFERENCE, RISE, complaint
from prorl_site.stack.processes import ROOT
from tests.e2e.conftest import BASE_IMAGE
from tests.e2e.harness import JSON, Line, wait_until
from tests.e2e.test_demo import output, what_is_left

TENSOR = "output_norm.weight"
SAID = "$(cut -d ' ' -f 2 /var/lib/boxes/opened)"


@pytest.fixture
def _asked_for(pytestconfig: pytest.Config) -> None:
    """Skip where nobody asked for the slow tests: the runs take most of half an hour."""
    if "slow" not in pytestconfig.option.markexpr:
        pytest.skip("a training run: make test-train")
    if not TRAINER.is_file():
        pytest.fail(f"{TRAINER} is missing: make test-train installs it")


@pytest.fixture
def var_folder() -> Iterator[Path]:
    """Return a folder that other accounts may pass, with the base image in it."""
    with tempfile.TemporaryDirectory(prefix="prorl-train-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "images").symlink_to(BASE_IMAGE.parent)
        yield folder


def start_training(var: Path, *arguments: str) -> subprocess.Popen[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PRORL_")}
    for name in ("DATABASE_URL", "BROKER_URL", "DJANGO_SETTINGS_MODULE"):
        environment.pop(name, None)
    options = ["--var", str(var), "--results", str(var / "results"), *arguments]
    with (var / "output").open("w") as stream:
        return subprocess.Popen(
            [sys.executable, "-m", "examples.train_demo", *options],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            text=True,
        )


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.usefixtures("_asked_for")
def test_the_reward_rises_and_both_sides_agree_on_every_token(var_folder: Path) -> None:
    run = start_training(var_folder)

    assert run.wait(timeout=2700) == 0, output(var_folder)

    results = var_folder / "results"
    found = json.loads((results / "train-demo.json").read_text())
    steps, rewards = found["steps"], [step["reward"] for step in found["steps"]]
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    assert np.mean(rewards[-ENDS:]) - np.mean(rewards[:ENDS]) >= RISE, rewards
    assert all(step["scored"] == step["rollouts"] == 32 for step in steps)
    assert all(step["tokens"] >= 2 * 32 for step in steps)
    assert max(step["largest_difference"] for step in steps) <= MAX_DIFFERENCE
    assert max(step["mean_difference"] for step in steps) <= MEAN_DIFFERENCE
    assert [step["version"] for step in steps] == list(range(STEPS))
    assert {step["lag"] for step in steps} <= {0, 1}
    assert (results / "train-demo.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    table = (results / "train-demo.md").read_text().splitlines()
    assert len([line for line in table if line.startswith("| ")]) == 1 + STEPS
    assert what_is_left(var_folder) == []


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("_asked_for")
def test_a_server_with_slightly_other_weights_is_found_out_at_the_first_batch(
    var_folder: Path,
) -> None:
    run = start_training(var_folder)
    server = wait_until(lambda: model_server(var_folder), "the model server", 300)
    norm = load_weights(var_folder / "cache" / "tiny").output_norm
    with (var_folder / "train-demo" / "weights" / "other.npz").open("wb") as file:
        np.savez(file, **{TENSOR: norm * np.float32(1.01)})

    info = {"update_info": {"path": "other.npz"}}
    httpx.post(f"{server}/update_weights", json=info, timeout=60).raise_for_status()

    assert run.wait(timeout=600) == 1, output(var_folder)
    assert "the trainer ended with 3" in output(var_folder)
    assert "log-probabilities differ" in output(var_folder)
    assert what_is_left(var_folder) == []


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("_asked_for")
def test_ctrl_c_during_the_training_leaves_nothing(var_folder: Path) -> None:
    run = start_training(var_folder)
    instances = var_folder / "train-demo" / "node" / "instances"
    wait_until(lambda: instances.is_dir() and any(instances.iterdir()), "a sandbox", 600)

    run.send_signal(signal.SIGINT)

    assert run.wait(timeout=90) == 130, output(var_folder)
    wait_until(lambda: what_is_left(var_folder) == [], f"the end: {what_is_left(var_folder)}", 15)


def model_server(var: Path) -> str | None:
    """Return the address of a run's model server once it answers."""
    remembered = var / "train-demo" / "processes.json"
    try:
        pid = json.loads(remembered.read_text())["model"][0]
        words = psutil.Process(pid).cmdline()
        url = f"http://127.0.0.1:{words[words.index('--port') + 1]}"
        return url if httpx.get(f"{url}/health", timeout=2).status_code == 200 else None
    except (OSError, KeyError, ValueError, psutil.NoSuchProcess, httpx.HTTPError):
        return None


def test_each_turn_earns_half_and_only_by_what_the_sandbox_answered(
    line: Line, import_folder: Callable[..., None], tmp_path: Path
) -> None:
    line.operator.call("POST", "/environments/", boxes.environment("base"))
    import_folder(boxes.NAME, boxes.write_tasks(tmp_path / "tasks"), boxes.NAME)
    plays = {
        "red": (["open red", f"code {SAID}"], {"reward": 1.0, "opened": 1.0, "said": 1.0}),
        "blue": (["open blue", "code 00"], {"reward": 0.5, "opened": 1.0, "said": 0.0}),
        "green": (["open blue", f"code {SAID}"], {"reward": 0.0, "opened": 0.0, "said": 0.0}),
        "black": (["code 47", "open black"], {"reward": 0.5, "opened": 1.0, "said": 0.0}),
        "white": (["submit"], {"reward": 0.0, "opened": 0.0, "said": 0.0}),
    }
    line.server.play(*[part(colour, turns) for colour, (turns, _) in plays.items()])
    experiment = line.experiment(boxes.NAME, budgets={"max_turns": 2})

    ended = line.wait_done(
        line.submit(experiment, [f"{boxes.NAME}/{colour}" for colour in plays]), seconds=120
    )

    assert [each["stop_reason"] for each in ended] == ["max_turns"] * 4 + ["finished"], ended
    found = {each["task_ref"]: each["rewards"] for each in ended}
    assert found == {f"{boxes.NAME}/{colour}": rewards for colour, (_, rewards) in plays.items()}
    shown = line.trajectory(ended[0]["id"])["messages"]
    code = shown[-3]["content"].split()[4]
    assert shown[-3]["content"] == f"The note says: code {code}\n[exit code: 0]"
    assert (len(code), code.isdigit()) == (2, True)


def part(colour: str, turns: Sequence[str]) -> JSON:
    """Return what the scripted server plays for a box."""
    return {"marker": f"The note is in the {colour} box.", "turns": list(turns), "after": "submit"}


def rows(rewards: Sequence[float], **values: float) -> list[JSON]:
    good = {"largest_difference": 1e-4, "mean_difference": 1e-5, **values}
    return [{"step": n, "reward": reward, **good} for n, reward in enumerate(rewards, 1)]


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (rows([0.2, 0.2, 0.2, 0.45, 0.45, 0.45]), ""),
        (rows([0.2, 0.2, 0.2, 0.45, 0.45, 0.44]), "rose by 0.247"),
        (rows([0.2, 0.2, 0.9]), "3 of 6 steps"),
        (rows([0.2, 0.2, 0.2, 0.9, 0.9, 0.9], largest_difference=0.0011), "step 1: the log-prob"),
        (rows([0.2, 0.2, 0.2, 0.9, 0.9, 0.9], mean_difference=0.00011), "step 1: the log-prob"),
        (rows([0.2, 0.2, 0.2, 0.9, 0.9, 0.9], mean_difference=float("nan")), "step 1: the log"),
    ],
)
def test_a_run_is_judged_by_its_rise_and_by_every_batch(made: list[JSON], words: str) -> None:
    said = complaint(made, steps=6)
    assert words in said
    assert bool(said) == bool(words)
