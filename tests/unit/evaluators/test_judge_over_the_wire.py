"""The judge in its own process, against a real small model's server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from evaluators import runner, surroundings
from evaluators.base import Artefacts, JudgeUnavailable
from examples.tiny_server.server import MODEL_NAME
from tests.unit.inference.conftest import CACHE, module_process

SETTINGS = {
    "model": MODEL_NAME,
    "votes": 2,
    "temperature": 1.0,
    "max_tokens": 6,
    "template": "{answer} {verdict}",
    "abstain_reward": -1,
}


@pytest.fixture(scope="module")
def tiny_server() -> Iterator[str]:
    """Yield the address of a server with a real, small and clueless model."""
    arguments = ("examples.tiny_server", "--port", "0", "--cache-dir", str(CACHE))
    with module_process(*arguments) as (_, url):
        yield url


@pytest.fixture(autouse=True)
def told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Keep votes in a folder of this test's."""
    monkeypatch.setattr(surroundings, "_told", {})
    surroundings.configure_children(
        judge_hosts=["127.0.0.1"], judge_cache=str(tmp_path / "votes"), judge_cache_bytes=10**6
    )


def test_a_real_server_votes_and_is_asked_once(tiny_server: str) -> None:
    settings = {**SETTINGS, "url": f"{tiny_server}/v1"}
    first = runner.score("judge", settings, {}, Artefacts(answer="7"), timeout_seconds=120)
    votes = first.details["votes"]
    assert [vote["seed"] for vote in votes] == [0, 1]
    assert all(0 < vote["tokens_out"] <= 6 < vote["tokens_in"] for vote in votes)
    assert first.details["tokens_in"] == sum(vote["tokens_in"] for vote in votes)
    assert first.reward in (-1.0, 0.0, 0.5, 1.0)

    again = runner.score("judge", settings, {}, Artefacts(answer="7"), timeout_seconds=120)

    assert [vote["cached"] for vote in again.details["votes"]] == [True, True]
    assert [vote["raw"] for vote in again.details["votes"]] == [vote["raw"] for vote in votes]
    assert (again.reward, again.details["tokens_in"]) == (first.reward, 0)


def test_a_model_that_the_server_has_not_is_the_graders_fault(tiny_server: str) -> None:
    settings = {**SETTINGS, "url": f"{tiny_server}/v1", "model": "none-such"}
    with pytest.raises(JudgeUnavailable, match="none-such"):
        runner.score("judge", settings, {}, Artefacts(answer="7"), timeout_seconds=120)


def test_the_judge_gives_up_before_its_process_is_killed() -> None:
    settings = {**SETTINGS, "url": "http://127.0.0.1:9/v1", "retries": 1000}
    with pytest.raises(JudgeUnavailable, match="gave no vote"):
        runner.score("judge", settings, {}, Artefacts(answer="7"), timeout_seconds=8)
