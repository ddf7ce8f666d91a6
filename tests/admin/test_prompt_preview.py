"""The prompt page: what the model sees, counted; safe to look at."""

import html
import re

import pytest
from django.contrib.auth import get_user_model
from django.contrib.auth.models import Permission

from examples.tiny_server.tokenizer import cached_tokenizer
from rollouts.handlers.command_line import CommandLineHandler
from rollouts.inference.rendering import load_renderer
from tests.admin.factories import make_environment, make_policy, make_task
from tests.unit.inference.conftest import CACHE

pytestmark = pytest.mark.django_db


@pytest.fixture
def tokenizer() -> str:
    return str(cached_tokenizer(CACHE))


def page(client, environment, **query: object) -> str:
    answer = client.get(f"/admin/sandboxes/environment/{environment.pk}/prompt/", query)
    assert answer.status_code == 200
    return answer.content.decode()


def prompt_of(text: str) -> str:
    """Return the prompt as a reader sees it."""
    found = re.search(r'<pre class="prompt">(.*?)</pre>', text, re.DOTALL)
    assert found is not None
    return html.unescape(re.sub(r"</?mark>", "", found[1]))


def counts_of(text: str) -> dict[str, int]:
    rows = re.findall(r'<th scope="row">([^<]+)</th><td>(-?\d+)</td>', text)
    return {name: int(number) for name, number in rows}


def test_the_prompt_of_a_set_s_first_task_is_shown_with_its_parts_counted(
    operator, tokenizer
) -> None:
    demonstration = [
        {"role": "user", "content": "List."},
        {"role": "assistant", "content": "ls"},
    ]
    environment = make_environment(
        prompt_format="jinja",
        system_prompt="Work in {{ workdir }} with {{ tools|map(attribute='name')|join(', ') }}.",
        agent_settings={
            "demonstrations": [demonstration],
            "instruction_template": "{{ task.ref }}: {{ instruction }}",
        },
        tool_settings={"bash": {"description": "Run in {{ workdir }}."}},
    )
    policy = make_policy(tokenizer=tokenizer, context_tokens=1000)
    task = make_task(ref="t1", instruction="Do <b>it</b>\u202e. <|im_end|>", hidden={"x": "SECRET"})

    text = page(operator.client, environment, policy=policy.pk, set=task.task_set_id)

    messages = [
        {"role": "system", "content": "Work in /app with bash, submit."},
        *demonstration,
        {"role": "user", "content": "t1: Do <b>it</b>\u202e. <|im_end|>"},
    ]
    renderer = load_renderer(tokenizer)
    ids = renderer.render(messages)
    shown = prompt_of(text)
    assert "<|im_start|>system\nWork in /app with bash, submit.<|im_end|>" in shown
    assert shown.count("t1: Do <b>it</b>\\u202e. <|im_end|><|im_end|>") == 1
    assert text.count("<mark>&lt;|im_end|&gt;</mark>") == 4
    assert "<b>it</b>" not in text
    assert "SECRET" not in text
    counts = counts_of(text)
    assert (counts["Whole prompt"], counts["Left of 1000"]) == (len(ids), 1000 - len(ids))
    parts = ["System prompt", "Tools", "Demonstrations", "Task"]
    assert sum(counts[name] for name in parts) == len(ids)
    assert counts["Tools"] == 0
    assert counts["Task"] == len(renderer.render(messages[-1:]))
    assert "Run in /app." in text
    assert "does not give these to the chat template" in text


def test_a_sample_instruction_is_shown_and_a_prompt_that_does_not_fit_said(
    operator, tokenizer
) -> None:
    environment = make_environment(system_prompt="Use {{ braces }}.")
    make_policy(tokenizer=tokenizer, context_tokens=16)

    text = page(operator.client, environment, instruction="Say <hello>.")

    assert "Use {{ braces }}." in prompt_of(text)
    assert "Say <hello>." in prompt_of(text)
    assert counts_of(text)["Left of 16"] < 0
    assert "The prompt does not fit the policy" in text


def test_what_is_missing_is_said_in_a_sentence(operator, tmp_path, settings) -> None:
    environment = make_environment()
    assert "There is no policy yet" in page(operator.client, environment)

    missing = make_policy(tokenizer=str(tmp_path / "nothing"))
    text = page(operator.client, environment, policy=missing.pk)
    assert f"{missing.tokenizer} is no tokenizer folder" in html.unescape(text)

    chat = make_policy(tokenizer="")
    text = page(operator.client, environment, policy=chat.pk)
    assert "has no tokenizer: its servers take messages" in text

    empty = make_task()
    empty.delete()
    text = page(operator.client, environment, policy=missing.pk, set=empty.task_set_id)
    assert "has no task." in text


def test_mcp_tools_are_named_and_their_server_left_alone(
    operator, tokenizer, tmp_path, settings
) -> None:
    servers = tmp_path / "servers.toml"
    servers.write_text(f'[notes]\ncommand = ["/bin/touch", "{tmp_path}/started"]\n')
    settings.MCP_SERVERS = str(servers)
    environment = make_environment(tools=["bash", "mcp:notes"])
    make_policy(tokenizer=tokenizer)

    text = page(operator.client, environment)

    assert "MCP servers are asked only when an episode starts: mcp:notes." in text
    assert not (tmp_path / "started").exists()


def test_only_who_may_see_environments_policies_and_tasks_sees_it(client) -> None:
    environment = make_environment()
    address = f"/admin/sandboxes/environment/{environment.pk}/prompt/"
    assert client.get(address).status_code == 302
    user = get_user_model().objects.create(username="reader", is_staff=True)
    client.force_login(user)
    for name, status in [
        ("view_environment", 403),
        ("view_policy", 403),
        ("view_task", 200),
    ]:
        user.user_permissions.add(Permission.objects.get(codename=name))
        assert client.get(address).status_code == status


def test_the_environment_s_page_leads_there(operator) -> None:
    environment = make_environment()
    answer = operator.client.get(f"/admin/sandboxes/environment/{environment.pk}/change/")
    link = f'<a href="/admin/sandboxes/environment/{environment.pk}/prompt/">As the model sees it'
    assert link in answer.content.decode()


MESSAGES = [
    {"role": "user", "content": "Fix it."},
    {"role": "assistant", "content": "ls"},
    {"role": "user", "content": "a.py"},
]


def test_a_task_s_own_conversation_is_shown_by_every_agent(operator, tokenizer) -> None:
    make_policy(tokenizer=tokenizer)
    task = make_task(ref="t1", instruction="Not shown.", payload={"messages": MESSAGES})
    branch = make_environment(
        name="branch", agent="branch", agent_settings={"style": "command_line"}, system_prompt="Go."
    )
    terminal = make_environment(name="terminal", system_prompt="Go.")

    text = page(operator.client, branch, set=task.task_set_id)
    other = page(operator.client, terminal, set=task.task_set_id)

    renderer = load_renderer(tokenizer)
    whole = len(renderer.render([{"role": "system", "content": "Go."}, *MESSAGES]))
    counts = counts_of(text)
    assert counts["Whole prompt"] == whole
    assert counts["System prompt"] + counts["Tools"] + counts["Given messages"] == whole
    assert counts["Given messages"] == len(renderer.render(MESSAGES))
    assert "ls<|im_end|>" in prompt_of(text)
    assert "Not shown." not in prompt_of(text)
    assert "Not shown." not in prompt_of(other)
    assert "a.py" in prompt_of(other)


def test_a_conversation_that_is_none_is_said_in_a_sentence(operator, tokenizer) -> None:
    make_policy(tokenizer=tokenizer)
    task = make_task(ref="t1", payload={"messages": MESSAGES[:2]})
    branch = make_environment(name="branch", agent="branch")

    text = page(operator.client, branch, set=task.task_set_id)

    assert "the last message is the assistant" in text


def test_an_agent_says_itself_whether_its_model_sees_the_tools(
    operator, tokenizer, monkeypatch
) -> None:
    make_policy(tokenizer=tokenizer)
    environment = make_environment(agent="command_line")
    told = "does not give these to the chat template"
    assert told in page(operator.client, environment)

    monkeypatch.setattr(CommandLineHandler, "shows_tools", lambda *_: True)

    assert told not in page(operator.client, environment)
