"""The keys of Harbor's `task.toml`: those that are taken or harmless, and older names of them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rollouts.importers.base import TaskRejected

KEPT_ENVIRONMENT = ("cpus", "memory_mb", "storage_mb", "network_mode", "allowed_hosts", "env")
# What is said of more than these is refused: nobody is to find out later that it had no effect.
# `[task]` and `[metadata]` hold what their authors like.
KNOWN: Mapping[str, frozenset[str]] = {
    "environment": frozenset(
        {
            *(*KEPT_ENVIRONMENT, "allow_internet", "memory", "storage", "docker_image", "workdir"),
            # Refused with a reason of their own where they say anything.
            *("gpus", "gpu_types", "tpu", "mcp_servers", "skills_dir", "healthcheck", "os"),
            "build_timeout_sec",  # images are built under the service's own limit
        }
    ),
    "agent": frozenset({"timeout_sec", "user", "network_mode"}),
    "verifier": frozenset(
        {"timeout_sec", "env", "user", "environment_mode", "environment", "collect", "network_mode"}
    ),
    "solution": frozenset({"env"}),
}
TOP = frozenset(
    {
        *("schema_version", "version", "task", "metadata", "artifacts", "steps", *KNOWN),
        *("source", "multi_step_reward_strategy"),  # where it came from; of tasks with steps
    }
)
_SIZE = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)\s*([KMG])I?B?", re.IGNORECASE)
_MEGABYTES = {"K": 1 / 1024, "M": 1, "G": 1024}


def refuse_unknown_keys(config: Mapping[str, Any]) -> None:
    """Raise `TaskRejected` that names what nothing here would heed."""
    _refuse(config, TOP, "task.toml")
    for name, known in KNOWN.items():
        table = config.get(name, {})
        if isinstance(table, Mapping):
            _refuse(table, known, f"[{name}]")


def kept_environment(environment: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a sandbox is made with, older names replaced; raise `TaskRejected`."""
    kept = {name: environment[name] for name in KEPT_ENVIRONMENT if name in environment}
    for old, new in (("memory", "memory_mb"), ("storage", "storage_mb")):
        if old in environment:
            if new in environment:
                raise TaskRejected(f"[environment] has {old} and {new}; leave {new}")
            kept[new] = _megabytes(old, environment[old])
    if "allow_internet" in environment:
        wanted = _network(environment["allow_internet"])
        if kept.setdefault("network_mode", wanted) != wanted:
            raise TaskRejected(
                "[environment] has allow_internet and network_mode; leave the latter"
            )
    hosts = kept.get("allowed_hosts", [])
    if not isinstance(hosts, list) or not all(isinstance(host, str) and host for host in hosts):
        raise TaskRejected("[environment] allowed_hosts must be a list of host names")
    return kept


def _network(allowed: Any) -> str:
    if not isinstance(allowed, bool):
        raise TaskRejected(f"[environment] allow_internet is {allowed!r}; it must be true or false")
    return "public" if allowed else "no-network"


def _megabytes(name: str, size: Any) -> int:
    found = _SIZE.fullmatch(size.strip()) if isinstance(size, str) else None
    if found is None:
        raise TaskRejected(f"[environment] {name} is {size!r}; write {name}_mb = 2048, or '2G'")
    return max(1, round(float(found[1]) * _MEGABYTES[found[2].upper()]))


def _refuse(table: Mapping[str, Any], known: frozenset[str], where: str) -> None:
    unknown = sorted(set(table) - known)
    if unknown:
        names = ", ".join(unknown)
        raise TaskRejected(f"{where} has {names}, which nothing here heeds; remove what is unknown")
