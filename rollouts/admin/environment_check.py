"""Check an environment's names and settings against what the workers have."""

from collections.abc import Iterator, Mapping
from typing import Any

from evaluators.base import EvaluatorFault
from evaluators.registry import get_evaluator
from rollouts.handlers.base import InvalidAgentSettings, UnknownHandler
from rollouts.handlers.registry import get_handler
from rollouts.tools.base import InvalidToolSettings, UnknownTool
from rollouts.tools.registry import build_tools
from sandboxes.limits import limit_errors
from sandboxes.network.allow_list import InvalidPattern, parse_pattern
from sandboxes.states import Network


def environment_errors(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the field and the reason of everything that no worker could run."""
    yield from _agent_errors(values)
    yield from _tool_errors(values["tools"])
    yield from _evaluator_errors(values)
    yield from _limit_errors(values["limits"])
    yield from _network_errors(values)
    if not str(values["workdir"]).startswith("/"):
        yield "workdir", "It must be an absolute path."


def _agent_errors(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    settings = values["agent_settings"]
    if not isinstance(settings, dict):
        yield "agent_settings", "It must be a JSON object."
        return
    try:
        handler = get_handler(values["agent"])
    except UnknownHandler as error:
        yield "agent", str(error)
        return
    try:
        handler.validate(settings)
    except InvalidAgentSettings as error:
        yield "agent_settings", str(error)
    if handler.needs_sandbox and values["image"] is None:
        yield "image", f"Agent {handler.name} works in a sandbox: choose an image."


def _tool_errors(tools: Any) -> Iterator[tuple[str, str]]:
    if not isinstance(tools, list) or not all(isinstance(name, str) for name in tools):
        yield "tools", "It must be a JSON list of names."
        return
    try:
        build_tools(tools)
    except (UnknownTool, InvalidToolSettings) as error:
        yield "tools", str(error)


def _evaluator_errors(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Check the settings beside a task's payload as small as may be: tasks bring their own."""
    settings = values["evaluator_settings"]
    if not isinstance(settings, dict):
        yield "evaluator_settings", "It must be a JSON object."
        return
    payload = {"answer": ""} if "pattern" in settings else {"answer": "", "pattern": "()"}
    try:
        evaluator = get_evaluator(values["evaluator"])
        evaluator.validate(settings, payload)
    except EvaluatorFault as error:
        name = "evaluator" if error.code == "evaluator.unknown" else "evaluator_settings"
        yield name, str(error)
        return
    if evaluator.needs_sandbox and values["image"] is None:
        yield "image", f"Evaluator {evaluator.name} works in a sandbox: choose an image."


def _limit_errors(limits: Any) -> Iterator[tuple[str, str]]:
    for reason in limit_errors(limits):
        yield "limits", reason


def _network_errors(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    hosts = values["egress_hosts"]
    if not isinstance(hosts, list):
        yield "egress_hosts", "It must be a JSON list of hosts."
        return
    try:
        for host in hosts:
            parse_pattern(host)
    except InvalidPattern as fault:
        yield "egress_hosts", f"{fault}."
    if hosts and values["network"] != Network.ALLOW_LIST:
        yield "egress_hosts", "Hosts are listed and the network is another one."
