"""Run a test script in a fresh sandbox and read the reward that it leaves, as Harbor does.

Contract: `/tests/test.sh` is run as a program, its output goes to
`/logs/verifier/test-stdout.txt`, the log. Then `/logs/verifier/reward.json` (a flat map of finite
numbers) is read first, else `reward.txt` (one number); the exit code is ignored. A bare number in
`reward.json`, which many scripts write, is read as `{"reward": number}`, and true and false as 1
and 0. Nothing lies in `/tests` and `/logs` when the script starts but what is put there for it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, NoReturn

from evaluators.base import (
    Artefacts,
    Command,
    Evaluator,
    InvalidSettings,
    JsonMap,
    Phase,
    PhaseResult,
    RewardMalformed,
    RewardMissing,
    RewardOutOfRange,
    Score,
)
from evaluators.scope import GRADING_SETTINGS, check_grading, read_network, read_workspace
from evaluators.settings import finite, read_choice, refuse_unknown

PHASE = "tests"
REWARD_JSON, REWARD_TXT = "/logs/verifier/reward.json", "/logs/verifier/reward.txt"
LOG = "/logs/verifier/test-stdout.txt"
REWARD_BYTES = 64 * 1024
ARTIFACT_BYTES = 4 * 1024 * 1024
MAX_ARTIFACTS = 64
# What the script itself says first: nothing that the agent wrote is asked to start it.
START = f'chmod +x /tests/test.sh; exec /tests/test.sh >"{LOG}" 2>&1'
MAX_BYTES = 1_000_000
MAX_NAMES = 1_000
MAX_NAME_LENGTH = 200
COMBINE = ("mean", "min", "max")


class ScriptEvaluator(Evaluator):
    """Run `/tests/test.sh` and read `reward.json` or `reward.txt`.

    The scalar is the key that the setting `key` names (default `reward`) if it is there, else the
    only key, else what `combine` (`mean`, `min`, `max`) makes of all. `range` `[low, high]`
    refuses rewards outside it. `scope`, `workspace` and `network` say what of the agent's work the
    script sees. The payload's `verifier_env` are variables of the script, its `artifacts` paths
    that are kept with the score.
    """

    name = "script"
    description = "A test script in a fresh sandbox writes the reward."
    needs_sandbox = True

    def validate(self, settings: JsonMap, payload: JsonMap) -> None:
        """Check the settings and the payload's `verifier_env` and `artifacts`."""
        refuse_unknown(
            settings, {"key", "combine", "range", *GRADING_SETTINGS}, evaluator=self.name
        )
        read_choice(settings, "combine", "mean", COMBINE)
        _key(settings)
        _range(settings)
        check_grading(settings)
        _env(payload)
        _artifacts(payload)

    def next_phase(self, settings: JsonMap, payload: JsonMap, artefacts: Artefacts) -> Phase | None:
        """Return the one sandbox in which the script runs."""
        if artefacts.phase(PHASE) is not None:
            return None
        collect = {REWARD_JSON: REWARD_BYTES, REWARD_TXT: REWARD_BYTES}
        for path in _artifacts(payload):  # whether it is a file or a folder, only the sandbox knows
            collect |= {path: ARTIFACT_BYTES, f"{path}/": ARTIFACT_BYTES}
        return Phase(
            name=PHASE,
            workspace=read_workspace(settings),
            files={f"/logs/{name}/.keep": (b"", 0o644) for name in ("verifier", "artifacts")},
            tests=True,
            commands=(Command(argv=("/bin/sh", "-c", START), env=_env(payload)),),
            collect=collect,
            log=LOG,
            network=read_network(settings),
        )

    def score(self, settings: JsonMap, payload: JsonMap, artefacts: Artefacts) -> Score:
        """Read the reward files; raise `RewardMissing`, `RewardMalformed`, `RewardOutOfRange`."""
        left = artefacts.phase(PHASE) or PhaseResult(name=PHASE)
        exit_code = left.commands[0].exit_code if left.commands else None
        log = (left.files.get(LOG) or b"").decode(errors="replace")
        try:
            source, rewards = _read_rewards(left.files, exit_code)
            reward, rule = _scalar(settings, rewards)
            _check_range(settings, source, reward, rewards, rule)
        except (RewardMissing, RewardMalformed, RewardOutOfRange) as fault:
            fault.log = log
            raise
        details = {"source": source, "scalar": rule, "exit_code": exit_code}
        kept = [
            path
            for name in _artifacts(payload)
            for path in (name, f"{name}/")
            if left.files.get(path)
        ]
        return Score(
            reward=reward,
            rewards={"reward": reward, **rewards},
            details={**details, "artifacts": kept} if "artifacts" in payload else details,
            log=log,
        )


def _read_rewards(
    files: Mapping[str, bytes | None], exit_code: int | None
) -> tuple[str, dict[str, float]]:
    """Return which file was read and the rewards in it."""
    as_json, as_text = files.get(REWARD_JSON), files.get(REWARD_TXT)
    if as_json is not None:
        return "reward.json", _read_json(as_json)
    if as_text is not None:
        return "reward.txt", _read_text(as_text)
    raise RewardMissing(
        "the test script left neither /logs/verifier/reward.json nor reward.txt "
        f"(exit code {exit_code})"
    )


def _check_range(
    settings: JsonMap, source: str, reward: float, rewards: dict[str, float], rule: str
) -> None:
    low, high = _range(settings)
    for name, value in {"reward": reward, **rewards}.items():
        if not low <= value <= high and (name == "reward" or rule == "combined"):
            raise RewardOutOfRange(f"{source}: {name!r} is {value:g}, outside {low:g} to {high:g}")


def _env(payload: JsonMap) -> dict[str, str]:
    """Return the variables that the script gets."""
    given = payload.get("verifier_env", {})
    if not isinstance(given, Mapping) or not all(
        isinstance(value, str) and name and "=" not in name and "\0" not in name + value
        for name, value in given.items()
    ):
        raise InvalidSettings("the payload's 'verifier_env' must map names to texts")
    return dict(given)


def _artifacts(payload: JsonMap) -> tuple[str, ...]:
    """Return the absolute paths that are kept, without a `/` at the end."""
    given = payload.get("artifacts", [])
    if not isinstance(given, list) or len(given) > MAX_ARTIFACTS:
        raise InvalidSettings(
            f"the payload's 'artifacts' must be a list of at most {MAX_ARTIFACTS} absolute paths"
        )
    paths = []
    for each in given:
        path = each.get("source") if isinstance(each, Mapping) else each  # Harbor has both forms
        if not isinstance(path, str) or not path.startswith("/") or not path.strip("/"):
            raise InvalidSettings(f"the payload's 'artifacts' hold {each!r:.200}, no absolute path")
        paths.append(path.rstrip("/"))
    return tuple(dict.fromkeys(paths))


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
