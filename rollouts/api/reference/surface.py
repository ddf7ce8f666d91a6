"""What the surface is set to: which policy and which task each request means, who may call it."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from pathlib import Path
from typing import Any

from django.conf import settings

Networks = tuple[IPv4Network | IPv6Network, ...]

ANY = "*"
LOOPBACK = ("127.0.0.0/8", "::1/128")
# What reference data sets call the task's text, in the order in which it is looked for.
INSTRUCTION_PATHS = ("$.instruction", "$.problem_statement", "$.prompt[0].content", "$.question")


class InvalidSurface(ValueError):
    """The file that PRORL_REFERENCE_SURFACE names is missing or wrong; says what to correct."""


@dataclass(frozen=True, kw_only=True)
class DataSource:
    """How instances of one `data_source` become tasks.

    Either `task_set`: the instance's `instance_id` is the reference of a task there. Or
    `environment`, with what the task holds: `instruction`, `payload` and `hidden`, in which a text
    such as `$.reward_model.ground_truth` stands for what the instance has there. `resolved_above`
    is the reward above which an instance counts as resolved; `patch` says that the agent's answer
    is a patch.
    """

    environment: str = ""
    task_set: str = ""
    instruction: str = ""
    payload: Mapping[str, Any] = field(default_factory=dict)
    hidden: Mapping[str, Any] = field(default_factory=dict)
    resolved_above: float = 0.99
    patch: bool = False


@dataclass(frozen=True, kw_only=True)
class Surface:
    """The whole file.

    `policy` is sampled from, and servers are added to it; `models` names other policies by the
    model or tokenizer that a request asks for. `account` is whom calls without a token are taken
    for, from `networks` alone. `timeout_seconds` is each stage's budget; a call waits twice that
    and ten seconds. `input_ids` false leaves them null: some trainers cut the ids by them.
    """

    policy: str
    data_sources: Mapping[str, DataSource]
    models: Mapping[str, str] = field(default_factory=dict)
    server_kind: str = "vllm"
    max_in_flight: int = 16
    timeout_seconds: float = 300.0
    input_ids: bool = True
    account: str = ""
    networks: Networks = ()

    @property
    def wait_seconds(self) -> float:
        """Return how long a call waits for its job, as the reference does."""
        return 2 * self.timeout_seconds + 10

    def policy_for(self, *names: str) -> str:
        """Return the policy of a request's model, else of its tokenizer, else the usual one.

        What stands before a `/` may be left out of `models`: `hosted_vllm/Qwen/Qwen3-4B` is found
        as it is, as `Qwen/Qwen3-4B` and as `Qwen3-4B`.
        """
        for name in names:
            words = name.split("/")
            for start in range(len(words)):
                found = self.models.get("/".join(words[start:]))
                if found:
                    return found
        return self.policy

    def policies(self) -> list[str]:
        """Return every policy that is named, each once."""
        return list(dict.fromkeys([self.policy, *self.models.values()]))

    def source(self, name: str) -> DataSource | None:
        """Return how a data source's instances become tasks, or None when it is not set."""
        return self.data_sources.get(name) or self.data_sources.get(ANY)

    def trusts(self, address: str) -> bool:
        """Tell whether calls without a token are taken from an address."""
        try:
            caller = ip_address(address)
        except ValueError:
            return False
        return bool(self.account) and any(caller in network for network in self.networks)


def current_surface() -> Surface | None:
    """Return the surface as its file stands now, None where it is off. Raises InvalidSurface."""
    path = settings.REFERENCE_SURFACE
    return read_surface(Path(path)) if path else None


def read_surface(path: Path) -> Surface:
    """Return the surface of a TOML or JSON file. Raises InvalidSurface."""
    try:
        text = path.read_text(encoding="utf-8")
        found = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (OSError, ValueError) as error:
        raise InvalidSurface(f"{path} cannot be read: {error}") from error
    return parse_surface(found)


def parse_surface(found: Any) -> Surface:
    """Return the surface of a parsed file. Raises InvalidSurface."""
    values = _known("the file", found, Surface)
    policy = values.get("policy")
    if not isinstance(policy, str) or not policy:
        raise InvalidSurface("policy must name the policy that is sampled from.")
    sources = _table("data_sources", values.get("data_sources"))
    if not sources:
        raise InvalidSurface("data_sources must hold one table for each data source, or for '*'.")
    account = values.get("account", "")
    networks = values.get("networks", list(LOOPBACK) if account else [])
    if networks and not account:
        raise InvalidSurface("networks are for calls without a token: name their account too.")
    surface = Surface(
        **{
            **values,
            "data_sources": {name: _data_source(name, each) for name, each in sources.items()},
            "models": _table("models", values.get("models", {})),
            "networks": _networks(networks),
        }
    )
    _check(surface)
    return surface


def _check(surface: Surface) -> None:
    for name in ("server_kind", "account"):
        if not isinstance(getattr(surface, name), str):
            raise InvalidSurface(f"{name} must be a text.")
    if not all(isinstance(each, str) and each for each in surface.models.values()):
        raise InvalidSurface("models must hold the names of policies by model.")
    for place, name in ((surface, "timeout_seconds"), (surface, "max_in_flight")):
        value = getattr(place, name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 1 <= value <= 86400:
            raise InvalidSurface(f"{name} must be a number from 1 to 86400, not {value!r}.")
    if not isinstance(surface.max_in_flight, int):
        raise InvalidSurface("max_in_flight must be a whole number.")
    if not isinstance(surface.input_ids, bool):
        raise InvalidSurface("input_ids must be true or false.")


def _data_source(name: str, table: Any) -> DataSource:
    where = f"data_sources.{name}"
    values = _known(where, table, DataSource)
    source = DataSource(**values)
    if not all(isinstance(getattr(source, each), str) for each in _TEXTS):
        raise InvalidSurface(f"{where}: {', '.join(_TEXTS)} must be texts.")
    if bool(source.environment) == bool(source.task_set):
        raise InvalidSurface(f"{where}: give either environment or task_set.")
    if source.task_set and set(values) & {"instruction", "payload", "hidden"}:
        raise InvalidSurface(f"{where}: a task of a task set has its own text and payload.")
    for each in ("payload", "hidden"):
        _table(f"{where}.{each}", getattr(source, each))
    above = source.resolved_above
    if isinstance(above, bool) or not isinstance(above, int | float):
        raise InvalidSurface(f"{where}: resolved_above must be a number, not {above!r}.")
    if not isinstance(source.patch, bool):
        raise InvalidSurface(f"{where}: patch must be true or false.")
    return source


_TEXTS = ("environment", "task_set", "instruction")


def _known(where: str, table: Any, kind: type[Any]) -> dict[str, Any]:
    names = [each.name for each in fields(kind)]
    unknown = sorted(set(_table(where, table)) - set(names))
    if unknown:
        raise InvalidSurface(f"{where}: unknown {unknown[0]!r}; known: {', '.join(names)}.")
    return dict(table)


def _table(where: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise InvalidSurface(f"{where} must be a table.")
    return value


def _networks(given: Any) -> Networks:
    if not isinstance(given, list):
        raise InvalidSurface("networks must be a list such as ['127.0.0.0/8'].")
    try:
        return tuple(ip_network(each) for each in given)
    except (ValueError, TypeError) as error:
        raise InvalidSurface(f"networks: {error}") from None
