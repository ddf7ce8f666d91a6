"""Make an episode's tools and the texts that its policy reads."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from django.conf import settings

from rollouts.exceptions import InfraFault
from rollouts.handlers.base import AgentCancelled
from rollouts.handlers.prompt import Prompt, render_prompt, render_tool_settings
from rollouts.models import Rollout
from rollouts.options import Budgets
from rollouts.services.host_tools import host_access
from rollouts.services.prompts import prompt_texts, prompt_variables
from rollouts.tools.background import CallCancelled
from rollouts.tools.base import InvalidToolSettings, Tool, ToolUnavailable, UnknownTool
from rollouts.tools.registry import build_tools, close_tools


@contextmanager
def tools_and_prompt(
    rollout: Rollout, budgets: Budgets, *, cancelled: Callable[[], bool]
) -> Iterator[tuple[dict[str, Tool], Prompt]]:
    """Yield the tools by the names that the policy calls, and the prompt; close the tools after.

    Raises InvalidTemplate, AgentCancelled, and InfraFault for tools that cannot be had: to be
    tried again when a server outside did not answer, for good when the environment is wrong.
    """
    environment, task = rollout.environment, rollout.group.task
    texts = prompt_texts(environment)
    described = render_tool_settings(texts, prompt_variables(environment, task))
    try:
        tools = build_tools(
            environment.tools,
            described,
            host=host_access(),
            call_seconds=min(budgets.tool_seconds, settings.TOOL_CALL_LIMIT_SECONDS),
            cancelled=cancelled,
        )
    except CallCancelled:
        raise AgentCancelled("the rollout was cancelled") from None
    except ToolUnavailable as lack:
        raise InfraFault(str(lack), code=lack.code) from lack
    except (UnknownTool, InvalidToolSettings) as error:
        raise InfraFault(str(error), code=error.code, retryable=False) from error
    try:
        yield tools, render_prompt(texts, prompt_variables(environment, task, list(tools.values())))
    finally:
        close_tools(tools)
