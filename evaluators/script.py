"""Read the reward that a test script left, as Harbor does.

Contract: `/logs/verifier/reward.json` (a flat map of finite numbers) is read first, then
`reward.txt` (one number); the exit code is ignored. A bare number in `reward.json`, which many
scripts write, is read as `{"reward": number}`, and true and false as 1 and 0.
"""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

from evaluators.base import (
    Artefacts,
    Evaluator,
    InvalidSettings,
    JsonMap,
    RewardMalformed,
    RewardMissing,
    RewardOutOfRange,
    Score,
)
from evaluators.settings import finite, read_choice, refuse_unknown

MAX_BYTES = 1_000_000
MAX_NAMES = 1_000
MAX_NAME_LENGTH = 200
COMBINE = ("mean", "min", "max")


class ScriptEvaluator(Evaluator):
    """Read `reward.json` or `reward.txt`.

    The scalar is the key that the setting `key` names (default `reward`) if it is there, else the
    only key, else what `combine` (`mean`, `min`, `max`) makes of all. `range` `[low, high]`
    refuses rewards outside it.
    """

    name = "script"
    description = "A test script in a fresh sandbox writes the reward."
    needs_sandbox = True

    def validate(self, settings: JsonMap, payload: JsonMap) -> None:  # noqa: ARG002
        """Check the names and forms of `key`, `combine` and `range`."""
        refuse_unknown(settings, {"key", "combine", "range"}, evaluator=self.name)
        read_choice(settings, "combine", "mean", COMBINE)
        _key(settings)
        _range(settings)

    def score(self, settings: JsonMap, payload: JsonMap, artefacts: Artefacts) -> Score:  # noqa: ARG002
        """Read the reward files; raise `RewardMissing`, `RewardMalformed`, `RewardOutOfRange`."""
        if artefacts.reward_json is not None:
            source, rewards = "reward.json", _read_json(artefacts.reward_json)
        elif artefacts.reward_txt is not None:
            source, rewards = "reward.txt", _read_text(artefacts.reward_txt)
        else:
            raise RewardMissing(
                "the test script left neither /logs/verifier/reward.json nor reward.txt "
                f"(exit code {artefacts.exit_code})",
                log=artefacts.test_log,
            )
        reward, rule = _scalar(settings, rewards)
        low, high = _range(settings)
        for name, value in {"reward": reward, **rewards}.items():
            if not low <= value <= high and (name == "reward" or rule == "combined"):
                raise RewardOutOfRange(
                    f"{source}: {name!r} is {value:g}, outside {low:g} to {high:g}",
                    log=artefacts.test_log,
                )
        return Score(
            reward=reward,
            rewards={"reward": reward, **rewards},
            details={"source": source, "scalar": rule, "exit_code": artefacts.exit_code},
            log=artefacts.test_log,
        )


def _read_json(data: bytes) -> dict[str, float]:
    text = _decode("reward.json", data)
    try:
        value = json.loads(text, parse_constant=_refuse, object_pairs_hook=_unique)
    except RewardMalformed:
        raise
    except (ValueError, RecursionError) as error:
        raise RewardMalformed(f"reward.json is not JSON: {str(error)[:200]}") from error
    if not isinstance(value, dict):
        return {"reward": _number("reward.json", "value", value)}
    if not value:
        raise RewardMalformed('reward.json is an empty map; write at least {"reward": 0}')
    if len(value) > MAX_NAMES:
        raise RewardMalformed(f"reward.json has {len(value)} names, more than {MAX_NAMES}")
    for name in value:
        if not name or len(name) > MAX_NAME_LENGTH:
            raise RewardMalformed(f"reward.json: names have 1 to {MAX_NAME_LENGTH} characters")
    return {name: _number("reward.json", name, entry) for name, entry in value.items()}


def _read_text(data: bytes) -> dict[str, float]:
    text = _decode("reward.txt", data)
    if len(text) > 100:
        raise RewardMalformed("reward.txt has more than one number in it")
    try:
        value = float(text)
    except ValueError as error:
        raise RewardMalformed(f"reward.txt is {text!r}, not one number") from error
    return {"reward": _number("reward.txt", "value", value)}


def _decode(source: str, data: bytes) -> str:
    if len(data) > MAX_BYTES:
        raise RewardMalformed(f"{source} has {len(data)} bytes, more than {MAX_BYTES}")
    try:
        text = data.decode("utf-8-sig").strip()
    except UnicodeDecodeError as error:
        raise RewardMalformed(f"{source} is not UTF-8 text") from error
    if not text:
        raise RewardMalformed(f"{source} is empty")
    return text


def _number(source: str, name: str, value: Any) -> float:
    if not isinstance(value, int | float):
        kinds: dict[type, str] = {dict: "a map", list: "a list", str: "text"}
        kind = kinds.get(type(value), "null")
        raise RewardMalformed(f"{source}: {name!r} is {kind}, not a number; the map must be flat")
    try:
        number = float(value)
    except OverflowError as error:
        raise RewardMalformed(f"{source}: {name!r} is too large") from error
    if not math.isfinite(number):
        raise RewardMalformed(f"{source}: {name!r} is {number}, not a finite number")
    return number


def _refuse(constant: str) -> NoReturn:
    raise RewardMalformed(f"reward.json holds {constant}, not a finite number")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise RewardMalformed("reward.json has the same name twice")
    return value


def _scalar(settings: JsonMap, rewards: dict[str, float]) -> tuple[float, str]:
    key = _key(settings)
    if key in rewards:
        return rewards[key], f"key {key}"
    if "key" in settings:
        raise RewardMalformed(f"the rewards have no {key!r}, which the settings name")
    if len(rewards) == 1:
        return next(iter(rewards.values())), "only key"
    values = list(rewards.values())
    combine = read_choice(settings, "combine", "mean", COMBINE)
    if combine == "mean":
        return math.fsum(value / len(values) for value in values), "combined"
    return (min if combine == "min" else max)(values), "combined"


def _key(settings: JsonMap) -> str:
    key = settings.get("key", "reward")
    if not isinstance(key, str) or not key:
        raise InvalidSettings(f"setting 'key' is {key!r}; it must be the name of a reward")
    return key


def _range(settings: JsonMap) -> tuple[float, float]:
    bounds = settings.get("range")
    if bounds is None:
        return -math.inf, math.inf
    if not isinstance(bounds, list) or len(bounds) != 2:
        raise InvalidSettings(f"setting 'range' is {bounds!r}; it must be [low, high]")
    low, high = (finite(bound, "setting 'range'") for bound in bounds)
    if low >= high:
        raise InvalidSettings(f"setting 'range' is {bounds!r}; low must be below high")
    return low, high
