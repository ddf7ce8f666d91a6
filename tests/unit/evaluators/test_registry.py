"""Evaluators by name: the built-in ones, plug-ins, and the same plug-ins in the child process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from evaluators import runner
from evaluators.base import Artefacts, UnknownEvaluator
from evaluators.registry import BUILT_IN, EVALUATORS, EvaluatorRegistry, get_evaluator

PURE = {"choice", "composite", "exact", "json_schema", "judge", "math", "process", "regex"}
MODULE = """
from evaluators.base import Score
from evaluators.exact import ExactEvaluator

class Good(ExactEvaluator):
    name = "good"
    version = "7"

    def score(self, settings, payload, artefacts):
        print("a plug-in that prints")
        return Score(reward=0.25, rewards={"reward": 0.25})

class Taken(ExactEvaluator):
    name = "script"

class Nameless(ExactEvaluator):
    name = ""

class Unversioned(ExactEvaluator):
    name = "unversioned"
    version = 2

class Failing(ExactEvaluator):
    def __init__(self):
        raise RuntimeError("no licence")

instance = Good()
"""


@pytest.fixture
def plug_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield a folder on the path with a module of plug-ins, not yet installed."""
    (tmp_path / "some_evaluators.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "some_evaluators", raising=False)
    configured = EVALUATORS.paths
    yield tmp_path
    EVALUATORS.configure(configured)


def test_the_built_in_evaluators_are_there_by_name() -> None:
    registry = EvaluatorRegistry()
    assert PURE | {"script"} <= set(registry)
    assert registry.faults == ()
    assert {registry[name].needs_sandbox for name in PURE} == {False}
    assert {name for name in PURE if registry[name].needs_messages} == {"process"}


def test_an_unknown_evaluator_is_told_with_the_known_ones() -> None:
    with pytest.raises(UnknownEvaluator, match="'vibes'; known are choice, ") as caught:
        get_evaluator("vibes")
    assert caught.value.code == "evaluator.unknown"


def test_an_installed_plug_in_is_found_by_its_entry_point(plug_ins: Path) -> None:
    info = plug_ins / "some_evaluators-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: some-evaluators\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[prorl.evaluators]\ngood = some_evaluators:Good\n")
    registry = EvaluatorRegistry()
    assert (registry["good"].version, registry.faults) == ("7", ())


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("some_evaluators.Taken", "the name 'script' is taken by the service"),
        ("some_evaluators.Nameless", "its name is '', not a str"),
        ("some_evaluators.Unversioned", "its version is 2, not a str"),
        ("some_evaluators.Failing", "RuntimeError: no licence"),
        ("some_evaluators.Missing", "has no attribute 'Missing'"),
        ("some_evaluators.MODULE", "AttributeError"),
        ("evaluators.base.Artefacts", "is no Evaluator"),
        ("no_such_module.Evaluator", "No module named 'no_such_module'"),
    ],
)
def test_a_broken_plug_in_is_named_and_takes_nothing_with_it(
    plug_ins: Path, path: str, reason: str
) -> None:
    registry = EvaluatorRegistry()
    registry.configure([path, "some_evaluators.Good"])
    assert set(registry) == set(EvaluatorRegistry()) | {"good"}
    (fault,) = registry.faults
    assert fault.startswith(f"setting EVALUATORS, {path}: ")
    assert reason in fault


def test_the_child_process_knows_the_plug_ins_of_its_service(plug_ins: Path) -> None:
    EVALUATORS.configure(["some_evaluators.instance"])
    result = runner.score("good", {}, {"answer": "a"}, Artefacts(answer="a"), timeout_seconds=60)
    assert (result.reward, dict(result.rewards)) == (0.25, {"reward": 0.25})


def test_every_built_in_evaluator_has_the_name_it_is_found_by() -> None:
    assert {name: get_evaluator(name).name for name in BUILT_IN} == {
        name: name for name in BUILT_IN
    }
    assert sorted(EvaluatorRegistry("no.such.group")) == sorted(BUILT_IN)


def test_a_grading_s_process_imports_the_evaluator_that_it_needs_alone() -> None:
    code = (
        "import sys, evaluators.child; from evaluators.registry import get_evaluator; "
        "get_evaluator('script'); print([n for n in ('math', 'swe', 'judge', 'json_schema') "
        "if 'evaluators.' + n in sys.modules])"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout == "[]\n"
