"""Put a reward together from several evaluators: weights, gates, clipping, penalties.

The children's phases run one child after the other, their names prefixed with the child's. A
child's fault is the whole's: a reward without one of its parts would be made up.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from evaluators.base import (
    Artefacts,
    Evaluator,
    EvaluatorFault,
    InvalidSettings,
    JsonMap,
    Phase,
    RewardMalformed,
    Score,
)
from evaluators.penalties import read_length, read_turns
from evaluators.settings import finite, read_number, read_text, refuse_unknown

KNOWN = {"children", "gate_reward", "low", "high", "length", "turns"}
CHILD = {"evaluator", "settings", "payload", "weight", "name", "gate"}
MAX_CHILDREN = 16
MAX_NESTING = 3
SEPARATOR = "/"
DETAILS_SHARE = 32 * 1024


@dataclass(frozen=True, kw_only=True)
class _Child:
    name: str
    evaluator: Evaluator
    settings: JsonMap
    payload: JsonMap | None
    weight: float
    gate: float | None

    def own(self, payload: JsonMap) -> JsonMap:
        """Return this child's payload: its own, laid over the task's part for it, or the task's.

        A task may carry `{"children": {name: payload}}`; without that every child gets all.
        """
        parts = payload.get("children")
        shared = payload
        if isinstance(parts, Mapping):
            part = parts.get(self.name, {})
            if not isinstance(part, Mapping):
                raise InvalidSettings(
                    f"composite: the payload's children.{self.name} must be an object"
                )
            shared = part
        return {**shared, **(self.payload or {})}

    def seen(self, artefacts: Artefacts) -> Artefacts:
        """Return the artefacts with this child's phases alone, under the names it gave them."""
        prefix = self.name + SEPARATOR
        own = tuple(
            replace(phase, name=phase.name.removeprefix(prefix))
            for phase in artefacts.phases
            if phase.name.startswith(prefix)
        )
        return replace(artefacts, phases=own)


class CompositeEvaluator(Evaluator):
    """Pay the weighted sum of children, where every gate is open, less penalties, clipped.

    Settings: `children`, a list of `{"evaluator", "settings", "payload", "weight" (1), "name",
    "gate"}`: with `gate` a number, the child's reward must be at least that, else the whole is
    `gate_reward` (0), and its `weight` is 0 unless it is given; `length` `{"max", "buffer",
    "penalty" (1)}`: DAPO's soft overlong punishment by sampled tokens; `turns` `{"free",
    "penalty", "max" (1)}`; `low` and `high` clip the reward. Penalties are taken from the gated
    reward too. The payload goes to every child, or `children` in it holds one for each name.
    """

    name = "composite"
    description = "Several evaluators, put together by weights, gates, clipping and penalties."
    needs_sandbox = False

    def wants_sandbox(self, settings: JsonMap) -> bool:
        """Tell whether a child runs phases."""
        try:
            return any(each.evaluator.wants_sandbox(each.settings) for each in _children(settings))
        except EvaluatorFault:  # `validate` says what is wrong
            return False

    def wants_messages(self, settings: JsonMap) -> bool:
        """Tell whether a child reads the conversation."""
        try:
            return any(each.evaluator.wants_messages(each.settings) for each in _children(settings))
        except EvaluatorFault:  # `validate` says what is wrong
            return False

    def sample_payload(self, settings: JsonMap) -> JsonMap:
        """Return a sample for every child."""
        samples = {
            each.name: each.evaluator.sample_payload(each.settings) for each in _children(settings)
        }
        return {"children": samples}

    def validate(self, settings: JsonMap, payload: JsonMap) -> None:
        """Check names, bounds, penalties and every child with its payload."""
        refuse_unknown(settings, KNOWN, evaluator=self.name)
        read_number(settings, "gate_reward", 0.0)
        _bounds(settings)
        read_length(settings)
        read_turns(settings)
        children = _children(settings)
        parts = payload.get("children")
        strangers = set(parts if isinstance(parts, Mapping) else ()) - {c.name for c in children}
        if strangers:
            raise InvalidSettings(
                f"composite: the payload has a child {sorted(strangers)[0]!r}; the settings have "
                f"{', '.join(child.name for child in children)}"
            )
        for child in children:
            with _of(child):
                child.evaluator.validate(child.settings, child.own(payload))

    def next_phase(self, settings: JsonMap, payload: JsonMap, artefacts: Artefacts) -> Phase | None:
        """Return the first phase that a child still wants, in the children's order."""
        for child in _children(settings):
            with _of(child):
                phase = child.evaluator.next_phase(
                    child.settings, child.own(payload), child.seen(artefacts)
                )
            if phase is not None:
                return replace(phase, name=child.name + SEPARATOR + phase.name)
        return None

    def score(self, settings: JsonMap, payload: JsonMap, artefacts: Artefacts) -> Score:
        """Score every child and put the parts together; raise the first child's fault."""
        children = _children(settings)
        scores: dict[str, Score] = {}
        for child in children:
            with _of(child):
                scores[child.name] = child.evaluator.score(
                    child.settings, child.own(payload), child.seen(artefacts)
                )
        parts = [child.weight * scores[child.name].reward for child in children]
        closed = [
            child.name
            for child in children
            if child.gate is not None and scores[child.name].reward < child.gate
        ]
        gated = read_number(settings, "gate_reward", 0.0) if closed else _sum(parts)
        length, turns = read_length(settings), read_turns(settings)
        by_length = length.of(artefacts.tokens) if length else 0.0
        by_turns = turns.of(artefacts.turns) if turns else 0.0
        low, high = _bounds(settings)
        before = _sum([gated, by_length, by_turns])
        reward = min(max(before, low), high)
        details = {
            "closed_gates": closed,
            "weighted": dict(zip(scores, parts, strict=True)),
            "before_clipping": before,
            "children": _details(scores),
        }
        penalties = {
            **({"length_penalty": by_length} if length else {}),
            **({"turn_penalty": by_turns} if turns else {}),
        }
        return Score(
            reward=reward,
            rewards={"reward": reward, **penalties, **_named(scores)},
            details=details,
            log="\n".join(f"[{name}] {score.log}" for name, score in scores.items()),
            turn_rewards=_turn_rewards(children, scores),
        )


@contextmanager
def _of(child: _Child) -> Iterator[None]:
    """Put the child's name before the message of its fault; the kind stays."""
    try:
        yield
    except EvaluatorFault as fault:
        raise type(fault)(f"{child.name}: {fault}", log=fault.log) from fault


def _sum(values: Iterable[float]) -> float:
    try:
        return math.fsum(values)
    except (OverflowError, ValueError) as error:
        raise RewardMalformed(f"composite: the weighted rewards are too large: {error}") from error


def _named(scores: Mapping[str, Score]) -> dict[str, float]:
    named: dict[str, float] = {}
    for name, score in scores.items():
        named[name] = score.reward
        named.update(
            {f"{name}.{part}": value for part, value in score.rewards.items() if part != "reward"}
        )
    return named


def _details(scores: Mapping[str, Score]) -> dict[str, Any]:
    """Return the children's details, each within its share of the room."""
    share = DETAILS_SHARE // len(scores)
    kept: dict[str, Any] = {}
    for name, score in scores.items():
        size = len(json.dumps(dict(score.details)))
        kept[name] = dict(score.details) if size <= share else {"left_out_bytes": size}
    return kept


def _turn_rewards(children: list[_Child], scores: Mapping[str, Score]) -> tuple[float | None, ...]:
    """Return the weighted sum by turn of those children that speak of turns."""
    speaking = [(child.weight, scores[child.name].turn_rewards) for child in children]
    length = max(len(rewards) for _, rewards in speaking)
    summed: list[float | None] = [None] * length
    for weight, rewards in speaking:
        for turn, reward in enumerate(rewards):
            if reward is not None:
                summed[turn] = (summed[turn] or 0.0) + weight * reward
    return tuple(summed)


def _children(settings: JsonMap, depth: int = 1) -> list[_Child]:
    entries = settings.get("children")
    if not isinstance(entries, list) or not 0 < len(entries) <= MAX_CHILDREN:
        raise InvalidSettings(
            f"composite: 'children' must be a list of 1 to {MAX_CHILDREN} objects such as "
            '{"evaluator": "math", "weight": 1}'
        )
    children = [_child(entry, depth) for entry in entries]
    names = [child.name for child in children]
    for name in names:
        if names.count(name) > 1:
            raise InvalidSettings(
                f"composite: two children are named {name!r}; give each a 'name' of its own"
            )
    return children


def _child(entry: Any, depth: int) -> _Child:
    from evaluators.registry import get_evaluator  # it lists this class: a cycle at import

    if not isinstance(entry, Mapping):
        raise InvalidSettings(f"composite: a child is {str(entry)[:100]!r}; it must be an object")
    refuse_unknown(entry, CHILD, evaluator="composite child")
    kind = read_text(entry, "evaluator", "", most=100)
    settings, payload = entry.get("settings", {}), entry.get("payload")
    if not isinstance(settings, Mapping) or not isinstance(payload, Mapping | None):
        raise InvalidSettings("composite: a child's 'settings' and 'payload' must be objects")
    name = read_text(entry, "name", kind, most=50)
    if not name or SEPARATOR in name or "." in name or name in _OWN:
        raise InvalidSettings(
            f"composite: a child's name is {name!r}; it must not be empty, one of "
            f"{', '.join(_OWN)}, or hold '/' or '.'"
        )
    if kind == CompositeEvaluator.name:
        if depth >= MAX_NESTING:
            raise InvalidSettings(f"composite: composites nest at most {MAX_NESTING} deep")
        _children(settings, depth + 1)
    gate = None if entry.get("gate") is None else finite(entry["gate"], "'gate' of a child")
    return _Child(
        name=name,
        evaluator=get_evaluator(kind),
        settings=settings,
        payload=payload,
        weight=read_number(entry, "weight", 1.0 if gate is None else 0.0),
        gate=gate,
    )


_OWN = ("reward", "length_penalty", "turn_penalty")


def _bounds(settings: JsonMap) -> tuple[float, float]:
    low = -math.inf if settings.get("low") is None else finite(settings["low"], "setting 'low'")
    high = math.inf if settings.get("high") is None else finite(settings["high"], "setting 'high'")
    if low > high:
        raise InvalidSettings(f"setting 'low' is {low:g} and 'high' {high:g}; low must be lower")
    return low, high
