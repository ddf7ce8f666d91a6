"""The reward files of a test script."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evaluators.base import (
    WHOLE,
    Artefacts,
    Base,
    InvalidSettings,
    RewardMalformed,
    RewardMissing,
    RewardOutOfRange,
    Score,
)
from evaluators.script import LOG, MAX_BYTES, REWARD_JSON, REWARD_TXT, ScriptEvaluator
from tests.script_left import script_artefacts, script_left

SCRIPT = ScriptEvaluator()


def score(
    reward_json: bytes | None = None,
    reward_txt: bytes | None = None,
    settings: dict[str, Any] | None = None,
) -> Score:
    """Score reward files after checking the settings."""
    SCRIPT.validate(settings or {}, {})
    artefacts = script_artefacts(reward_json, reward_txt)
    return SCRIPT.score(settings or {}, {}, artefacts)


def test_the_map_wins_over_the_text_and_the_exit_code_is_ignored() -> None:
    assert score(b'{"reward": 0.5, "style": 1}', b"1") == Score(
        reward=0.5,
        rewards={"reward": 0.5, "style": 1.0},
        details={"source": "reward.json", "scalar": "key reward", "exit_code": 1},
        log="ran",
    )


@pytest.mark.parametrize(
    ("text", "reward"),
    [(b"1", 1.0), (b" 0.25\n", 0.25), (b"-2e-3", -0.002), (b"\xef\xbb\xbf1\n", 1.0), (b"0", 0.0)],
)
def test_reward_txt(text: bytes, reward: float) -> None:
    assert score(None, text).rewards == {"reward": reward}
    assert score(None, text).reward == reward


@pytest.mark.parametrize(
    ("data", "settings", "reward", "rule"),
    [
        (b"0.75", {}, 0.75, "key reward"),
        (b"true", {}, 1.0, "key reward"),
        (b'{"passed": false}', {}, 0.0, "only key"),
        (b'{"accuracy": 0.3}', {}, 0.3, "only key"),
        (b'{"a": 0, "b": 1}', {}, 0.5, "combined"),
        (b'{"a": 0.25, "b": 1}', {"combine": "min"}, 0.25, "combined"),
        (b'{"a": 0, "b": 1}', {"combine": "max"}, 1.0, "combined"),
        (b'{"a": 0, "reward": 1}', {"combine": "min"}, 1.0, "key reward"),
        (b'{"a": 0.2, "reward": 1}', {"key": "a"}, 0.2, "key a"),
        (b'{"reward": 1, "seconds": 12}', {"range": [0, 1]}, 1.0, "key reward"),
    ],
)
def test_the_scalar(data: bytes, settings: dict[str, Any], reward: float, rule: str) -> None:
    result = score(data, None, settings)
    assert (result.reward, result.details["scalar"]) == (reward, rule)


def test_nothing_left_is_missing_and_keeps_the_log() -> None:
    with pytest.raises(RewardMissing, match=r"exit code 1") as caught:
        score()
    assert (caught.value.code, caught.value.log) == ("evaluator.reward_missing", "ran")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"  \n",
        b"{",
        b"{}",
        b"[1]",
        b"null",
        b'"1"',
        b'{"reward": "1"}',
        b'{"reward": null}',
        b'{"reward": [1]}',
        b'{"reward": {"value": 1}}',
        b'{"reward": NaN}',
        b'{"reward": Infinity}',
        b'{"reward": -Infinity}',
        b'{"reward": 1e999}',
        b'{"reward": 0, "reward": 1}',
        b'{"": 1}',
        b"\xff\xfe",
        b"1" * 5000,
        b"[" * 100_000,
        b" " * (MAX_BYTES + 1),
        json.dumps({str(i): 1 for i in range(1001)}).encode(),
        json.dumps({"a" * 201: 1}).encode(),
    ],
    ids=lambda data: repr(data[:20]),
)
def test_malformed_maps(data: bytes) -> None:
    with pytest.raises(RewardMalformed) as caught:
        score(data, b"1")
    assert caught.value.code == "evaluator.reward_malformed"


@pytest.mark.parametrize(
    "text", [b"", b"nan", b"inf", b"-inf", b"1 2", b"one", b"\xff", b"9" * 101]
)
def test_malformed_texts(text: bytes) -> None:
    with pytest.raises(RewardMalformed):
        score(None, text)


def test_a_named_key_must_be_there() -> None:
    with pytest.raises(RewardMalformed, match="'a'"):
        score(b'{"reward": 1}', None, {"key": "a"})


@pytest.mark.parametrize("data", [b"1.5", b'{"reward": -0.1}', b'{"a": 2, "b": 0}'])
def test_a_declared_range_is_kept(data: bytes) -> None:
    with pytest.raises(RewardOutOfRange) as caught:
        score(data, None, {"range": [0, 1]})
    assert caught.value.code == "evaluator.reward_out_of_range"
    assert isinstance(score(data), Score)


@pytest.mark.parametrize(
    "settings",
    [
        {"range": [1, 0]},
        {"range": [0]},
        {"range": [0, float("inf")]},
        {"range": "0-1"},
        {"combine": "sum"},
        {"key": ""},
        {"scalar": "mean"},
        {"scope": "system"},
        {"workspace": "/app", "scope": "workspace"},
        {"workspace": []},
        {"workspace": ["app"]},
        {"workspace": ["/app/../etc"]},
        {"workspace": ["/app"], "scope": "whole"},
        {"network": 1},
    ],
)
def test_wrong_settings_are_named(settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidSettings, match=next(iter(settings))):
        SCRIPT.validate(settings, {})


@given(data=st.binary(max_size=200))
def test_any_bytes_are_a_score_or_a_fault(data: bytes) -> None:
    for arguments in ((data, None), (None, data)):
        with contextlib.suppress(RewardMalformed):
            result = score(*arguments)
            assert result.rewards["reward"] == result.reward


finite = st.floats(-1e6, 1e6)


@given(rewards=st.dictionaries(st.text(min_size=1, max_size=20), finite, min_size=1, max_size=20))
def test_every_flat_finite_map_is_read_back(rewards: dict[str, float]) -> None:
    result = score(json.dumps(rewards).encode())
    assert {name: result.rewards[name] for name in rewards} == rewards
    if "reward" in rewards:
        assert result.reward == rewards["reward"]
    else:
        assert min(rewards.values()) - 1e-6 <= result.reward <= max(rewards.values()) + 1e-6


def test_the_script_runs_once_in_a_sandbox_of_what_the_agent_left() -> None:
    phase = SCRIPT.next_phase({}, {"verifier_env": {"DEPTH": "3"}}, Artefacts())

    assert phase is not None
    assert (phase.base, phase.workspace, phase.tests) == (Base.AGENT, (), True)
    assert (phase.log, phase.network) == (LOG, False)
    assert set(phase.collect) == {REWARD_JSON, REWARD_TXT}
    assert [command.env for command in phase.commands] == [{"DEPTH": "3"}]
    assert "/logs/verifier/.keep" in phase.files
    assert SCRIPT.next_phase({}, {}, script_artefacts()) is None


@pytest.mark.parametrize(
    ("settings", "workspace"),
    [
        ({"scope": "whole"}, WHOLE),
        ({"workspace": ["/srv/site//", "/etc/app"]}, ("/srv/site", "/etc/app")),
        ({"workspace": ["/app", "/"]}, WHOLE),
    ],
)
def test_a_task_says_what_of_the_agents_work_its_script_sees(
    settings: dict[str, Any], workspace: tuple[str, ...]
) -> None:
    phase = SCRIPT.next_phase({**settings, "network": True}, {}, Artefacts())

    assert phase is not None
    assert (phase.workspace, phase.network) == (workspace, True)


def test_declared_artifacts_are_collected_whether_files_or_folders() -> None:
    payload = {"artifacts": ["/app/out.txt", {"source": "/app/plots/", "destination": "plots"}]}

    phase = SCRIPT.next_phase({}, payload, Artefacts())

    assert phase is not None
    wanted = {"/app/out.txt", "/app/out.txt/", "/app/plots", "/app/plots/"}
    assert set(phase.collect) == {REWARD_JSON, REWARD_TXT, *wanted}
    files = {"/app/out.txt": b"x", "/app/out.txt/": None, "/app/plots": b"", "/app/plots/": b"tar"}
    left = Artefacts(phases=(script_left(b"1", files=files),))
    assert SCRIPT.score({}, payload, left).details["artifacts"] == ["/app/out.txt", "/app/plots/"]


@pytest.mark.parametrize(
    "payload",
    [
        {"verifier_env": {"A": 1}},
        {"verifier_env": ["A=1"]},
        {"verifier_env": {"A=B": "1"}},
        {"verifier_env": {"": "1"}},
        {"verifier_env": {"A": "\0"}},
        {"artifacts": "/app"},
        {"artifacts": ["app"]},
        {"artifacts": ["/"]},
        {"artifacts": [{"destination": "x"}]},
        {"artifacts": ["/app"] * 65},
    ],
)
def test_wrong_payloads_are_named(payload: dict[str, Any]) -> None:
    with pytest.raises(InvalidSettings, match=next(iter(payload))):
        SCRIPT.validate({}, payload)
