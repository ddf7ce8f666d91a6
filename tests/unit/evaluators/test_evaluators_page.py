"""The evaluator of docs/evaluators.md, taken from the page, registered and run in its process."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from evaluators import runner
from evaluators.base import Artefacts, InvalidSettings, Score
from evaluators.registry import BUILT_IN, EVALUATORS, EvaluatorRegistry, get_evaluator

PAGE = (Path(__file__).parents[3] / "docs" / "evaluators.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    """Return the page's blocks in this language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.S | re.M)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield a folder on the path with the page's package in it."""
    (code,) = blocks("python")
    (tmp_path / "words_evaluator.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "words_evaluator", raising=False)
    configured = EVALUATORS.paths
    yield tmp_path
    EVALUATORS.configure(configured)


def test_the_evaluator_of_the_page_scores_in_its_own_process(package: Path) -> None:
    (path,) = re.findall(r"`PRORL_EVALUATORS=([\w.]+)`", PAGE)
    EVALUATORS.configure([path])
    payload = {"words": ["red", "green", "blue", "grey"]}

    half = runner.score(
        "words", {"bonus": 0.5}, payload, Artefacts(answer="red or blue"), timeout_seconds=60
    )

    assert half == Score(
        reward=0.5,
        rewards={"share": 0.5, "bonus": 0.0},
        details={"missing": ["green", "grey"]},
        log="2 words are missing",
    )
    words = get_evaluator("words")
    words.validate({}, words.sample_payload({}))
    best = words.reference_answer({}, payload)
    assert words.score({"bonus": 0.5}, payload, Artefacts(answer=best)).reward == 1.5
    with pytest.raises(InvalidSettings, match="list of words"):
        runner.score("words", {}, {}, Artefacts(), timeout_seconds=60)


def test_the_entry_point_of_the_page_is_found(package: Path) -> None:
    info = package / "words_evaluator-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: words\nVersion: 1.0\n")
    (block,) = blocks("toml")
    heading, line = block.splitlines()
    assert heading == '[project.entry-points."prorl.evaluators"]'
    (info / "entry_points.txt").write_text(f"[prorl.evaluators]\n{line.replace(chr(34), '')}\n")
    registry = EvaluatorRegistry()
    assert (registry["words"].version, registry.faults) == ("1", ())


def test_the_page_names_every_built_in_evaluator() -> None:
    for name in BUILT_IN:
        assert f"\n| `{name}` |" in PAGE


def test_the_settings_on_the_page_are_valid() -> None:
    judge, process, composite = (json.loads(block) for block in blocks("json"))
    get_evaluator("judge").validate(judge, {})
    get_evaluator("process").validate(process, {})
    get_evaluator("composite").validate(composite, {"answer": "5"})
