"""An episode's tools and texts, made from what the catalogue holds."""

import sys

import pytest
from django.conf import settings as site

from rollouts.exceptions import InfraFault
from rollouts.handlers.base import AgentCancelled
from rollouts.handlers.templates import InvalidTemplate
from rollouts.options import Budgets
from rollouts.services.submit import GroupRequest, submit_groups
from rollouts.stages.prompting import tools_and_prompt
from rollouts.tools.base import ToolContext
from sandboxes.models import Environment
from tests.admin.factories import make_environment, make_experiment, make_task

pytestmark = pytest.mark.django_db


@pytest.fixture
def servers(tmp_path, settings) -> None:
    path = tmp_path / "servers.toml"
    program = f'["{sys.executable}", "-m", "tests.unit.tools.mcp_program"]'
    path.write_text(
        f'[notes]\ncommand = {program}\ncwd = "{site.BASE_DIR}"\n'
        'env = {PYTHONDONTWRITEBYTECODE = "1"}\n[gone]\ncommand = ["/nowhere"]\n'
    )
    settings.MCP_SERVERS = str(path)
    settings.TOOL_RECORDING = "live"


def rollout_of(environment: Environment):
    task = make_task(environment=environment, instruction="Add.", metadata={"level": 3})
    request = GroupRequest(task=task.pk, samples=1)
    return submit_groups(experiment=make_experiment(), requests=[request])[0].rollouts.get()


def never() -> bool:
    return False


def test_templates_know_the_tools_and_tools_their_descriptions_and_budget(servers) -> None:
    environment = make_environment(
        prompt_format="jinja",
        system_prompt="Level {{ task.metadata.level }}: {{ tools[1].name }}, "
        "{{ tools[1].description }}",
        tools=["bash", "mcp:notes/add"],
        tool_settings={"mcp:notes/add": {"description": "Sum, for {{ environment }}."}},
    )
    budgets = Budgets.stored({**Budgets().as_dict(), "tool_seconds": 7.0})

    with tools_and_prompt(rollout_of(environment), budgets, cancelled=never) as (tools, prompt):
        answer = tools["notes__add"].call({"a": 20, "b": 22}, ToolContext(timeout_seconds=30))
        limits = [tool.timeout_seconds for tool in tools.values()]

    assert answer.content == "42"
    assert prompt.system_prompt == f"Level 3: notes__add, Sum, for {environment.ref}."
    assert (prompt.instruction, limits) == ("Add.", [7.0, 7.0])


def test_what_cannot_be_had_ends_the_try_and_says_whether_another_may_help(servers) -> None:
    rollout = rollout_of(make_environment(tools=["mcp:gone"]))
    with (
        pytest.raises(InfraFault, match="MCP server gone does not tell its tools") as gone,
        tools_and_prompt(rollout, Budgets(), cancelled=never),
    ):
        pytest.fail("there are no tools")
    assert (gone.value.code, gone.value.retryable) == ("tool.unavailable", True)

    rollout = rollout_of(make_environment(tools=["mcp:other"]))
    with (
        pytest.raises(InfraFault, match="no MCP server 'other' is allowed here") as unknown,
        tools_and_prompt(rollout, Budgets(), cancelled=never),
    ):
        pytest.fail("there are no tools")
    assert (unknown.value.code, unknown.value.retryable) == ("tool.unknown", False)

    rollout = rollout_of(make_environment(tools=["mcp:notes"]))
    with (
        pytest.raises(AgentCancelled),
        tools_and_prompt(rollout, Budgets(), cancelled=lambda: True),
    ):
        pytest.fail("there are no tools")


def test_a_template_that_this_task_cannot_fill_is_the_environment_s_fault() -> None:
    environment = make_environment(prompt_format="jinja", system_prompt="{{ task.hidden.tests }}")
    with (
        pytest.raises(InvalidTemplate, match="system_prompt, line 1: 'dict object' has no"),
        tools_and_prompt(rollout_of(environment), Budgets(), cancelled=never),
    ):
        pytest.fail("there is no prompt")
