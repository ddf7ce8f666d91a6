"""The trainers' own packages against the real line; `make test-adapters` makes what they need."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from prorl_site.stack.processes import ROOT
from tests.adapters.run_real import KNOWN, VENVS, command_of, environment_of
from tests.e2e.harness import Line, marker, write_task

ImportFolder = Callable[..., None]
FAILS = "echo 0 > /logs/verifier/reward.txt"


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", [name for name, each in KNOWN.items() if each.live])
def test_trainers_take_what_the_line_samples(
    name: str,
    line: Line,
    import_folder: ImportFolder,
    tmp_path: Path,
    tokenizer_folder: Path,
) -> None:
    # Given an environment with the trainers, a task that is solved and one that is not.
    python = Path(os.environ.get(VENVS, "")) / name / "bin" / "python"
    if not os.environ.get(VENVS) or not python.is_file():
        pytest.skip(f"{VENVS} names no environment {name!r}: run make test-adapters")
    solved = write_task(tmp_path, f"solved-{name}")
    failed = write_task(tmp_path, f"failed-{name}", test=FAILS)
    import_folder(f"trainers-{name}", tmp_path)
    # What is read differs from sample to sample, as what a real policy says would.
    turns = ["head -c 6 /dev/urandom | base64 | tee x", "cat x", "submit"]
    line.server.play(
        *({"marker": marker(f"{each}-{name}"), "turns": turns} for each in ("solved", "failed"))
    )
    experiment = line.experiment(f"trainers-{name}")

    # When their tests run against the service.
    service = {
        "PRORL_URL": line.stack.url,
        "PRORL_TOKEN": line.trainer.token,
        "TEST_EXPERIMENT": experiment,
        "TEST_TASKS": f"{solved},{failed}",
        "TEST_TOKENIZER": str(tokenizer_folder),
    }
    done = subprocess.run(
        command_of(name, python),
        cwd=ROOT,
        env=environment_of(name, **service),
        capture_output=True,
        text=True,
        timeout=1700,
        check=False,
    )

    # Then they pass; only what has no checkout here is skipped.
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
    assert "source is not here" in done.stdout or " skipped" not in done.stdout
