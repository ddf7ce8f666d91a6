"""The first prompt of an environment as a policy's model will see it, with its tokens counted."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

from django.core.exceptions import PermissionDenied
from django.http import HttpRequest

from rollouts.handlers.base import AgentFault, Message
from rollouts.handlers.conversation import InvalidConversation
from rollouts.handlers.prompt import opening, render_prompt, render_tool_settings
from rollouts.handlers.registry import get_handler
from rollouts.inference.exceptions import RenderingFault
from rollouts.inference.rendering import ConversationRenderer, load_renderer
from rollouts.inference.tokenizer_folder import TokenizerFolder
from rollouts.models import Policy, Task, TaskSet
from rollouts.services.host_tools import host_access
from rollouts.services.prompts import prompt_texts, prompt_variables
from rollouts.tools.base import InvalidToolSettings, ToolUnavailable, UnknownTool
from rollouts.tools.mcp_tools import PREFIX
from rollouts.tools.registry import build_tools, close_tools
from sandboxes.admin.shown import cut, plain
from sandboxes.models import Environment

MAX_CHOICES = 200
MAX_INSTRUCTION = 20_000
MAX_SHOWN = 200_000
SAMPLE_INSTRUCTION = "Say which files are in the working directory."
_FAULTS = (
    AgentFault,
    InvalidConversation,
    InvalidToolSettings,
    RenderingFault,
    ToolUnavailable,
    UnknownTool,
)


@dataclass(frozen=True)
class Piece:
    """Hold a run of text; `special` is one control token."""

    text: str
    special: bool


@dataclass(frozen=True)
class Part:
    """Hold the tokens of one part of the prompt, the template's own around it included."""

    name: str
    tokens: int


@dataclass(frozen=True)
class Preview:
    """Hold what the page shows; `left` is negative when the prompt does not fit."""

    pieces: list[Piece]
    parts: list[Part]
    total: int
    context: int
    left: int
    schemas: list[tuple[str, str]]
    shows_tools: bool
    unasked: list[str]
    shortened: bool


def preview_page(request: HttpRequest, environment: Environment) -> dict[str, Any]:
    """Return the context of the page: the choices, and the preview or why there is none.

    Raises PermissionDenied for who may see no policies or no tasks.
    """
    if not all(
        getattr(request.user, "has_perm")(f"rollouts.view_{name}")  # noqa: B009
        for name in ("policy", "task")
    ):
        raise PermissionDenied
    policies = list(Policy.objects.order_by("name")[:MAX_CHOICES])
    sets = list(TaskSet.objects.order_by("name")[:MAX_CHOICES])
    policy = _chosen(policies, request.GET.get("policy", "")) or next(iter(policies), None)
    task_set = _chosen(sets, request.GET.get("set", ""))
    instruction = request.GET.get("instruction", "")[:MAX_INSTRUCTION] or SAMPLE_INSTRUCTION
    page: dict[str, Any] = {
        "policies": policies,
        "sets": sets,
        "policy": policy,
        "task_set": task_set,
        "instruction": instruction,
    }
    task: Task | None = Task(ref="sample", instruction=instruction)
    if task_set is not None:
        task = Task.objects.filter(task_set=task_set).defer("hidden").order_by("ref").first()
    if policy is None:
        return {**page, "problem": "There is no policy yet: add one to see the prompt in tokens."}
    if task is None:
        return {**page, "problem": f"Task set {task_set} has no task."}
    page["task"] = task
    if policy.is_text_only:
        reason = f"Policy {policy} has no tokenizer: its servers take messages, and count tokens."
        return {**page, "problem": reason}
    try:
        return {**page, "preview": make_preview(environment, policy, task)}
    except _FAULTS as fault:
        return {**page, "problem": plain(str(fault))}


def make_preview(environment: Environment, policy: Policy, task: Task) -> Preview:
    """Render an episode's first prompt and count its parts.

    MCP servers are not asked from here: their tools are shown where they were recorded. Raises
    AgentFault, RenderingFault and what is wrong with the environment's tools.
    """
    host = host_access()
    replayed = host.cassettes.mode == "replay"
    asked = [n for n in environment.tools if replayed or not n.startswith(PREFIX)]
    unasked = [name for name in environment.tools if name not in asked]
    texts = prompt_texts(environment)
    settings = render_tool_settings(texts, prompt_variables(environment, task))
    settings = {name: given for name, given in settings.items() if name in asked}
    tools = build_tools(asked, settings, host=host)
    try:
        schemas = [tool.schema() for tool in tools.values()]
        variables = prompt_variables(environment, task, list(tools.values()))
    finally:
        close_tools(tools)
    handler = get_handler(environment.agent)
    given = task.payload.get("messages") or () if handler.takes_messages else ()
    messages = opening(render_prompt(texts, variables), given)
    renderer = load_renderer(policy.tokenizer)
    shown = schemas if handler.shows_tools(environment.agent_settings) else []
    ids = renderer.render(messages, shown or None)
    pieces, shortened = _pieces(TokenizerFolder(Path(policy.tokenizer)), ids)
    return Preview(
        pieces=pieces,
        parts=_parts(renderer, messages, shown, len(ids), is_given=bool(given)),
        total=len(ids),
        context=policy.context_tokens,
        left=policy.context_tokens - len(ids),
        schemas=[
            (tool["function"]["name"], cut(json.dumps(tool, indent=2, ensure_ascii=False)))
            for tool in schemas
        ],
        shows_tools=bool(shown),
        unasked=unasked,
        shortened=shortened,
    )


def _parts(
    renderer: ConversationRenderer,
    messages: Sequence[Message],
    tools: Sequence[dict[str, Any]],
    total: int,
    *,
    is_given: bool,
) -> list[Part]:
    """Count each part as what the prompt is longer for it; the parts add up to the total."""
    has_system = messages[0]["role"] == "system"
    system, task = list(messages[:has_system]), list(messages[-1:])
    without_tools = len(renderer.render(messages)) if tools else total
    if is_given:
        alone = len(renderer.render(messages[has_system:])) if has_system else without_tools
        return [
            Part("System prompt", without_tools - alone),
            Part("Tools", total - without_tools),
            Part("Given messages", alone),
        ]
    without_examples = len(renderer.render([*system, *task]))
    task_alone = len(renderer.render(task))
    return [
        Part("System prompt", without_examples - task_alone),
        Part("Tools", total - without_tools),
        Part("Demonstrations", without_tools - without_examples),
        Part("Task", task_alone),
    ]


def _pieces(folder: TokenizerFolder, ids: Sequence[int]) -> tuple[list[Piece], bool]:
    """Return the prompt's text, its control tokens apart, and whether its end was left out."""
    control = {token.id: token.text for token in folder.control}
    pieces: list[Piece] = []
    run: list[int] = []
    size = 0
    for token in [*ids, None]:
        if token is not None and token not in control:
            run.append(token)
            continue
        if run:
            pieces.append(Piece(plain(folder.decode(run, skip_special=False)), False))
            size += len(pieces[-1].text)
            run = []
        if token is not None:
            pieces.append(Piece(plain(control[token]), True))
        if size > MAX_SHOWN:
            last = pieces.pop()
            return [*pieces, Piece(last.text[:MAX_SHOWN], last.special)], True
    return pieces, False


def _chosen(rows: Sequence[Any], text: str) -> Any:
    try:
        wanted = UUID(text)
    except ValueError:
        return None
    return next((row for row in rows if row.pk == wanted), None)
