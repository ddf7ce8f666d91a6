"""What no worker could run is refused over HTTP as in the admin."""

import pytest

from sandboxes.models import Environment
from tests.api.callers import Caller, assert_problem

JINJA = {"prompt_format": "jinja", "system_prompt": "In {{ workdir }}."}


@pytest.mark.parametrize(
    ("values", "field", "reason"),
    [
        ({"tools": ["rocket"]}, "tools", "no tool 'rocket'"),
        ({"tools": ["mcp:notes"]}, "tools", "no MCP server 'notes' is allowed here"),
        (
            {"tools": ["bash"], "tool_settings": {"bash": {"output_bytes": 1}}},
            "tool_settings",
            "output_bytes is 1",
        ),
        ({"tool_settings": {"bash": {}}}, "tool_settings", "is not among the tools"),
        ({"prompt_format": "mustache"}, "prompt_format", "is not a valid choice"),
        ({**JINJA, "system_prompt": "\n{{"}, "system_prompt", "system_prompt, line 2"),
        (
            {**JINJA, "agent_settings": {"instruction_template": "{{ x }}"}},
            "agent_settings",
            "there is no variable 'x'",
        ),
    ],
)
def test_wrong_tools_and_templates_are_refused(operator: Caller, values, field, reason) -> None:
    response = operator.call("POST", "environments/", {"name": "shell", **values})

    assert_problem(response, 400, "request.invalid")
    assert field in response.content.decode()
    assert reason in response.content.decode().replace("\\u0027", "'")
    assert not Environment.objects.filter(name="shell").exists()


def test_tools_and_templates_are_kept_and_shown(operator: Caller) -> None:
    settings = {"bash": {"timeout_seconds": 5}}
    values = {"name": "shell", "tools": ["bash"], "tool_settings": settings, **JINJA}

    first = operator.call("POST", "environments/", values)
    again = operator.call("POST", "environments/", values)

    assert (first.status_code, again.json()["id"]) == (201, first.json()["id"])
    kept = {name: first.json()[name] for name in ("tool_settings", *JINJA)}
    assert kept == {"tool_settings": settings, **JINJA}
