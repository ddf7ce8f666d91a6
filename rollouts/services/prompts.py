"""From the catalogue's rows to the texts that a policy reads."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rollouts.handlers.base import InvalidAgentSettings
from rollouts.handlers.prompt import PromptTexts, check_prompt
from rollouts.handlers.templates import InvalidTemplate
from rollouts.models import Task
from rollouts.services.host_tools import host_access
from rollouts.tools.base import InvalidToolSettings, Tool, UnknownTool
from rollouts.tools.registry import check_tools
from sandboxes.models import Environment


def prompt_texts(environment: Environment) -> PromptTexts:
    """Return an environment's texts as they are stored."""
    return PromptTexts(
        format=environment.prompt_format,
        system_prompt=environment.system_prompt,
        settings=environment.agent_settings,
        tool_settings=environment.tool_settings,
    )


def prompt_variables(
    environment: Environment, task: Task, tools: Sequence[Tool] = ()
) -> dict[str, Any]:
    """Return what templates may say: of a task only what its agent may know.

    The list is closed: `hidden` holds the tests, and of `payload` a setup script or a file's
    content would tell what the agent has to find out.
    """
    return {
        "instruction": task.instruction,
        "task": {
            "ref": task.ref,
            "metadata": task.metadata,
            "files": sorted(task.payload.get("files") or {}),
            "agent_timeout_seconds": task.payload.get("agent_timeout_seconds"),
        },
        "environment": environment.ref,
        "workdir": environment.workdir,
        "tools": [{"name": tool.name, "description": tool.description} for tool in tools],
    }


def tool_errors(tools: Any, tool_settings: Any) -> Iterator[tuple[str, str]]:
    """Yield the field and the reason of names and settings that no worker could use."""
    if not isinstance(tools, list) or not all(isinstance(name, str) for name in tools):
        yield "tools", "It must be a JSON list of names."
        return
    if not isinstance(tool_settings, dict):
        yield "tool_settings", "It must be a JSON object."
        return
    for name in tool_settings:
        if name not in tools:
            yield "tool_settings", f"{name!r} is not among the tools of this environment."
            return
    try:
        check_tools(tools, tool_settings, host=host_access())
    except UnknownTool as error:
        yield "tools", str(error)
    except InvalidToolSettings as error:
        yield "tool_settings", str(error)


def tool_rule(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what `tool_errors` finds in an environment's values, absent ones being empty."""
    yield from tool_errors(values.get("tools", []), values.get("tool_settings", {}))


def prompt_rule(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what `template_errors` finds in an environment's values, absent ones being empty."""
    empty = {"agent_settings": {}, "tool_settings": {}, "system_prompt": "", "prompt_format": ""}
    yield from template_errors({**empty, **values})


def template_errors(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the field and the reason of a text that is no template, by an environment's values."""
    if not isinstance(values["agent_settings"], dict):
        return
    tool_settings = values["tool_settings"]
    texts = PromptTexts(
        format=values["prompt_format"],
        system_prompt=values["system_prompt"],
        settings=values["agent_settings"],
        tool_settings=tool_settings if isinstance(tool_settings, dict) else {},
    )
    try:
        check_prompt(texts)
    except InvalidTemplate as error:
        text = str(error)
        field = "agent_settings"
        if text.startswith("system_prompt"):
            field = "system_prompt"
        elif text.startswith("description of"):
            field = "tool_settings"
        yield field, text
    except InvalidAgentSettings as error:
        yield "agent_settings", str(error)
