"""Check an environment's names and settings against what the workers have."""

from collections.abc import Iterator, Mapping
from typing import Any

from evaluators.base import EvaluatorFault
from evaluators.registry import get_evaluator
from rollouts.handlers.base import InvalidAgentSettings, UnknownHandler
from rollouts.handlers.prompt import PromptTexts, plain_settings
from rollouts.handlers.registry import get_handler
from rollouts.services.prompts import template_errors, tool_errors
from sandboxes.limits import limit_errors
from sandboxes.network.allow_list import InvalidPattern, parse_pattern
from sandboxes.states import Network


def environment_errors(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the field and the reason of everything that no worker could run."""
    yield from _agent_errors(values)
    yield from template_errors(values)
    yield from tool_errors(values["tools"], values["tool_settings"])
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
        handler.validate(plain_settings(_texts(values)))
    except InvalidAgentSettings as error:
        yield "agent_settings", str(error)
    if handler.needs_sandbox and values["image"] is None:
        yield "image", f"Agent {handler.name} works in a sandbox: choose an image."


def _texts(values: Mapping[str, Any]) -> PromptTexts:
    return PromptTexts(
        format=values["prompt_format"],
        system_prompt=values["system_prompt"],
        settings=values["agent_settings"],
    )


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
