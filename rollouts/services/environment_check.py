"""Check an environment's names and settings against what the workers have."""

from collections.abc import Iterator, Mapping
from typing import Any

from evaluators.base import EvaluatorFault
from evaluators.registry import get_evaluator
from rollouts.exceptions import InfraFault
from rollouts.handlers.base import InvalidAgentSettings, UnknownHandler
from rollouts.handlers.prompt import PromptTexts, plain_settings
from rollouts.handlers.registry import get_handler
from rollouts.services.prompts import template_errors, tool_errors
from rollouts.services.secrets import replace_marks
from sandboxes.limits import limit_errors
from sandboxes.network.allow_list import InvalidPattern, parse_pattern
from sandboxes.setup_files import file_errors, secret_errors, secrets_for
from sandboxes.states import Network


def environment_errors(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the field and the reason of everything that no worker could run."""
    yield from _agent_errors(values)
    yield from template_errors(values)
    yield from tool_errors(values["tools"], values["tool_settings"])
    yield from _evaluator_errors(values)
    yield from _limit_errors(values["limits"])
    yield from _network_errors(values)
    yield from file_and_secret_errors(values)
    if not str(values["workdir"]).startswith("/"):
        yield "workdir", "It must be an absolute path."


def file_and_secret_errors(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the field and the reason of files and secrets that no worker could give a sandbox."""
    for reason in file_errors(values.get("files", {})):
        yield "files", reason
    for reason in secret_errors(values.get("secrets", {})):
        yield "secrets", reason


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
    try:
        # What a worker will put in is a text; its name must be one that the environment gives.
        settings = replace_marks(settings, _stand_ins(values.get("secrets", {})))
    except InfraFault as missing:
        yield "evaluator_settings", str(missing)
        return
    try:
        evaluator = get_evaluator(values["evaluator"])
        evaluator.validate(settings, evaluator.sample_payload(settings))
        wants_sandbox = evaluator.wants_sandbox(settings)
    except EvaluatorFault as error:
        name = "evaluator" if error.code == "evaluator.unknown" else "evaluator_settings"
        yield name, str(error)
        return
    if wants_sandbox and values["image"] is None:
        yield "image", f"Evaluator {evaluator.name} works in a sandbox: choose an image."


def _stand_ins(secrets: Any) -> dict[str, str]:
    """Return a text for each secret that the evaluator is given; none where they are wrong."""
    if any(secret_errors(secrets)):
        return {}
    return dict.fromkeys(secrets_for(secrets, "evaluator"), "secret")


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
