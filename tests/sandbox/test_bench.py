"""The sandbox comparison runs, counts what it says, and leaves nothing behind."""

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.sandbox.goals import Goal, Verdict
from benchmarks.sandbox.measures import Measure
from sandboxes.runtime.processes import all_pids
from tests.sandbox.conftest import REPOSITORY, open_folder

WAYS = {"pipe to bash: the limit": 5, "shell": 5, "shell on pipes": 5, "exec": 5}
SUBJECTS = {"builtin true", "/bin/true", "echo hello", "ls -la /usr/bin", "1.3 MB of seq"}


@pytest.fixture
def work() -> Iterator[Path]:
    """Yield an empty folder for the run's sandboxes, with a name that tells its processes."""
    folder = open_folder("prorl-bench-tests-")
    yield folder
    shutil.rmtree(folder)


def words(image: Path, work: Path, results: Path) -> list[str]:
    """Return the command line of the smallest run: our own ways and the limit."""
    return [
        *(sys.executable, "-m", "benchmarks.sandbox", "--quick", "--only", "commands"),
        *("--ways", "pipe,shell,shell-pipes,exec", "--image", str(image)),
        *("--work", str(work), "--results", str(results)),
    ]


def processes_naming(text: str) -> list[int]:
    """Return the processes with `text` in their command line."""
    found = []
    for pid in all_pids():
        try:
            line = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if text.encode() in line:
            found.append(pid)
    return found


@pytest.mark.sandbox
def test_a_quick_run_counts_every_call_and_stores_both_files(
    base_image: Path, work: Path, tmp_path: Path
) -> None:
    done = subprocess.run(
        words(base_image, work, tmp_path),
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (stored,) = tmp_path.glob("*.json")
    (table,) = tmp_path.glob("*.md")
    report = json.loads(stored.read_text())
    counts = {(m["way"], m["subject"]): m["n"] for m in report["measures"]}
    assert counts == {(way, s): 2 * calls for way, calls in WAYS.items() for s in SUBJECTS}
    assert all(min(m["values"]) > 0 and len(m["values"]) == m["n"] for m in report["measures"])
    assert report["notes"] == []
    verdicts = {goal["goal"]: goal["verdict"] for goal in report["goals"]}
    assert verdicts["builtin, SWE-ReX as it ships : a shell"] == "not measured"
    assert verdicts["builtin through a shell : pipe"] in ("met", "not met")
    assert "| pipe to bash: the limit |" in table.read_text()
    assert str(work) not in stored.read_text()
    assert list(work.iterdir()) == []
    assert processes_naming(str(work)) == []


@pytest.mark.sandbox
def test_an_interrupted_run_stores_nothing_and_ends_what_it_started(
    base_image: Path, work: Path, tmp_path: Path
) -> None:
    argv = [*words(base_image, work, tmp_path), "--rounds", "100000"]
    with subprocess.Popen(
        argv, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as run:
        assert run.stderr is not None
        assert run.stderr.readline().startswith("commands: 100000 rounds")
        assert processes_naming(str(work)) != []
        run.send_signal(signal.SIGINT)
        output, _ = run.communicate()
    assert run.returncode == 130
    assert output == "interrupted: nothing is stored, nothing runs on\n"
    assert list(tmp_path.iterdir()) == []
    assert list(work.iterdir()) == []
    assert processes_naming(str(work)) == []


def measure(values: tuple[float, ...]) -> Measure:
    """Return a measure of nothing in particular."""
    return Measure(section="s", subject="x", way="w", unit="ms", values=values)


def test_the_95th_percentile_is_a_sample_that_was_taken() -> None:
    assert measure(tuple(float(n) for n in range(100, 0, -1))).p95 == 95.0
    assert measure((3.0, 1.0, 2.0)).p95 == 3.0
    assert measure((7.0,)).p95 == 7.0
    assert measure((4.0, 1.0, 2.0, 3.0)).median == 2.5


@pytest.mark.parametrize(
    ("relation", "value", "word"),
    [
        ("at most", 2.0, "met"),
        ("at most", 2.01, "not met"),
        ("at least", 2.0, "met"),
        ("at least", 1.99, "not met"),
        ("at least", None, "not measured"),
    ],
)
def test_a_goal_is_met_at_its_limit(relation: str, value: float | None, word: str) -> None:
    goal = Goal(
        text="g",
        measured=("s", "x", "w"),
        against=None,
        relation="at most" if relation == "at most" else "at least",
        limit=2.0,
    )
    assert Verdict(goal=goal, value=value).word == word
