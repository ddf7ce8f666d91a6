"""Saving an environment makes a new version; what no worker could run is refused."""

import json

import pytest

from sandboxes.models import Environment
from tests.admin.conftest import messages_of
from tests.admin.factories import make_environment, make_image, make_node, make_task

pytestmark = pytest.mark.django_db


def form_of(environment: Environment, **changes: object) -> dict[str, object]:
    """Return what the browser sends for an environment."""
    values = {
        "name": environment.name,
        "description": environment.description,
        "image": environment.image_id or "",
        "setup": environment.setup,
        "workdir": environment.workdir,
        "agent": environment.agent,
        "agent_settings": json.dumps(environment.agent_settings),
        "system_prompt": environment.system_prompt,
        "prompt_format": environment.prompt_format,
        "tools": json.dumps(environment.tools),
        "tool_settings": json.dumps(environment.tool_settings),
        "network": environment.network,
        "egress_hosts": json.dumps(environment.egress_hosts),
        "gpu": environment.gpu,
        "warm": environment.warm,
        "limits": json.dumps(environment.limits),
        "evaluator": environment.evaluator,
        "evaluator_settings": json.dumps(environment.evaluator_settings),
    }
    return {**values, **changes}


def test_an_edit_makes_a_new_version_and_leaves_the_used_one_alone(operator) -> None:
    first = make_environment(setup="true")
    task = make_task(environment=first)
    before = Environment.objects.values().get(pk=first.pk)

    answer = operator.post(Environment, "change", form_of(first, setup="apt-get update"), first.pk)

    assert answer.status_code == 302
    assert Environment.objects.values().get(pk=first.pk) == before
    newest = Environment.objects.get(name=first.name, version=2)
    assert (newest.setup, newest.image_id, newest.tools) == (
        "apt-get update",
        first.image_id,
        ["bash", "submit"],
    )
    task.refresh_from_db()
    assert task.environment_id == first.pk
    assert messages_of(answer)[0] == (
        f"Saved as the new version {first.name}@2; rollouts that were submitted keep theirs."
    )


def test_what_goes_on_after_saving_is_the_new_version(operator) -> None:
    first = make_environment()

    form = form_of(first, setup="true", _continue="1")
    answer = operator.post(Environment, "change", form, first.pk)

    second = Environment.objects.get(name=first.name, version=2)
    assert answer["Location"] == f"/admin/sandboxes/environment/{second.pk}/change/"
    assert messages_of(answer) == [
        f"Saved as the new version {first.name}@2; rollouts that were submitted keep theirs."
    ]


def test_saving_without_a_difference_makes_no_version(operator) -> None:
    first = make_environment()

    answer = operator.post(Environment, "change", form_of(first), first.pk)

    assert Environment.objects.filter(name=first.name).count() == 1
    assert messages_of(answer)[0] == f"Nothing differs from {first.name}@1: no new version."


def test_a_new_environment_is_version_one(operator) -> None:
    form = form_of(make_environment(), name="fresh")

    answer = operator.post(Environment, "add", form)

    assert Environment.objects.get(name="fresh").version == 1
    assert messages_of(answer)[0] == "Saved as the first version, fresh@1."


def test_an_environment_cannot_be_deleted(operator) -> None:
    environment = make_environment()

    answer = operator.post(Environment, "delete", {"post": "yes"}, environment.pk)

    assert answer.status_code == 403
    assert Environment.objects.filter(pk=environment.pk).exists()


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("agent", "nobody", "Select a valid choice. nobody is not one of the available choices."),
        ("evaluator", "x", "Select a valid choice. x is not one of the available choices."),
        ("agent_settings", "[]", "It must be a JSON object."),
        ("agent_settings", "{", "Enter a valid JSON."),
        (
            "agent_settings",
            '{"max_malformed": 0}',
            "setting 'max_malformed' is 0; it must be a whole number, 1 or more",
        ),
        (
            "evaluator_settings",
            '{"combine": "sum"}',
            "setting 'combine' is 'sum'; it must be one of max, mean, min",
        ),
        (
            "tools",
            '["bash", "rocket"]',
            "no tool 'rocket'; known are bash, editor, ipython, submit, think, web_search",
        ),
        ("tools", '"bash"', "It must be a JSON list of names."),
        ("limits", '{"memory_bytes": 0}', "memory_bytes must be a whole number above 0, not 0."),
        (
            "limits",
            '{"cpu": 1}',
            "Unknown limit 'cpu'; known: memory_bytes, cpus, processes, "
            "disk_bytes, output_bytes, lifetime_seconds.",
        ),
        ("limits", '{"cpus": 0}', "cpus must be a number above 0, not 0."),
        ("limits", '{"cpus": true}', "cpus must be a number above 0, not True."),
        ("limits", '{"processes": 2.5}', "processes must be a whole number above 0, not 2.5."),
        ("egress_hosts", '"pypi.org"', "It must be a JSON list of hosts."),
        ("egress_hosts", '["pypi.org"]', "Hosts are listed and the network is another one."),
        ("gpu", "tpu", "Select a valid choice. tpu is not one of the available choices."),
        ("warm", "-1", "Ensure this value is greater than or equal to 0."),
        ("warm", "257", "Ensure this value is less than or equal to 256."),
        ("workdir", "app", "It must be an absolute path."),
        (
            "name",
            "No Such Name",
            "Use lower-case letters, digits, '.', '_' and '-', beginning with a letter or digit.",
        ),
    ],
)
def test_what_no_worker_could_run_is_refused(operator, field, value, reason) -> None:
    form = form_of(make_environment(), name="candidate")

    answer = operator.post(Environment, "add", {**form, field: value})

    assert answer.status_code == 200
    assert answer.context["adminform"].form.errors[field] == [reason]
    assert not Environment.objects.exclude(name__startswith="environment-").exists()


def test_an_agent_that_needs_a_sandbox_needs_an_image(operator) -> None:
    form = form_of(make_environment(), name="candidate", image="")

    answer = operator.post(Environment, "add", form)

    assert answer.context["adminform"].form.errors["image"] == [
        "Agent command_line works in a sandbox: choose an image.",
        "Evaluator script works in a sandbox: choose an image.",
    ]


def test_an_agent_without_sandbox_needs_no_image(operator) -> None:
    form = form_of(
        make_environment(),
        name="sums",
        image="",
        agent="single_turn",
        tools="[]",
        evaluator="regex",
        evaluator_settings='{"pattern": "[0-9]+"}',
    )

    assert operator.post(Environment, "add", form).status_code == 302
    assert Environment.objects.get(name="sums").image_id is None


def test_the_hosts_network_is_shown_in_red_and_told_at_saving(operator) -> None:
    environment = make_environment()
    red = '<strong style="color:#ba2121">host</strong>'
    before = operator.get(Environment).content.decode()

    answer = operator.post(
        Environment, "change", form_of(environment, network="host"), environment.pk
    )

    assert red not in before
    assert messages_of(answer)[1] == f"{environment.name}@2 lets agents reach the host's network."
    assert red in operator.get(Environment).content.decode()


@pytest.mark.parametrize(
    ("hosts", "reason"),
    [
        ('["pypi.org", "http://x.org"]', "'http://x.org' is not a host such as pypi.org, "),
        ('["pypi.org:0"]', "'pypi.org:0': a port is 1 to 65535."),
        ("[7]", "7 is not a host: write it as text."),
    ],
)
def test_a_host_that_is_none_is_refused(operator, hosts, reason) -> None:
    form = form_of(make_environment(), name="candidate", network="allow_list", egress_hosts=hosts)

    answer = operator.post(Environment, "add", form)

    (error,) = answer.context["adminform"].form.errors["egress_hosts"]
    assert error.startswith(reason)
    assert not Environment.objects.filter(name="candidate").exists()


def test_listed_hosts_gpu_warmth_and_cpus_are_saved(operator) -> None:
    form = form_of(
        make_environment(),
        name="wide",
        network="allow_list",
        egress_hosts='["pypi.org", "*.example.org:8443", "10.0.0.5"]',
        gpu="nvidia",
        warm="3",
        limits='{"cpus": 0.5}',
    )

    assert operator.post(Environment, "add", form).status_code == 302

    saved = Environment.objects.get(name="wide")
    assert saved.egress_hosts == ["pypi.org", "*.example.org:8443", "10.0.0.5"]
    assert (saved.gpu, saved.warm, saved.limits) == ("nvidia", 3, {"cpus": 0.5})


def test_how_each_node_keeps_each_limit_is_shown_and_none_is_red(operator) -> None:
    environment = make_environment()
    silent = make_node()
    assert "no node has told yet" in page_of(operator, environment)

    make_node(name="gpu-1", enforcement={"memory": "cgroup v2", "disk": "none"})
    make_node(name="<b>", enforcement={"cpu": "<i>"})
    page = page_of(operator, environment)

    assert (
        '<div><strong>&lt;b&gt;</strong>: <span style="">cpu by &lt;i&gt;</span></div>'
        '<div><strong>gpu-1</strong>: <span style="color:#ba2121">disk none</span>, '
        '<span style="">memory by cgroup v2</span></div>'
    ) in page
    assert silent.name not in page


def page_of(operator, environment: Environment) -> str:
    return operator.get(Environment, "change", environment.pk).content.decode()


def test_an_image_in_use_cannot_be_deleted_and_its_source_can_change(operator) -> None:
    from sandboxes.models import Image

    image = make_image()
    make_environment(image=image)

    operator.post(Image, "delete", {"post": "yes"}, image.pk)
    form = {"source": "/images/new.sif", "files": "{}", "parameters": "{}", "reuse": image.reuse}
    operator.post(Image, "change", form, image.pk)

    image.refresh_from_db()
    assert image.source == "/images/new.sif"


@pytest.mark.parametrize(
    ("changes", "field", "reason"),
    [
        (
            {"prompt_format": "jinja", "system_prompt": "a\n{{ nobody }}"},
            "system_prompt",
            "system_prompt, line 2: there is no variable 'nobody'; known are environment, "
            "instruction, task, tools, workdir",
        ),
        (
            {"tool_settings": '{"bash": {"output_bytes": 1}}'},
            "tool_settings",
            "bash: output_bytes is 1; it must be 256 to 16 MiB",
        ),
        (
            {"tool_settings": '{"think": {}}'},
            "tool_settings",
            "'think' is not among the tools of this environment.",
        ),
        ({"tool_settings": "[]"}, "tool_settings", "It must be a JSON object."),
        (
            {"tools": '["mcp:notes"]'},
            "tools",
            "no MCP server 'notes' is allowed here; allowed: none",
        ),
    ],
)
def test_templates_and_tool_settings_are_checked_when_saved(
    operator, changes, field, reason
) -> None:
    environment = make_environment()

    answer = operator.post(Environment, "change", form_of(environment, **changes), environment.pk)

    assert answer.status_code == 200
    assert answer.context["adminform"].form.errors == {field: [reason]}
    assert Environment.objects.filter(name=environment.name).count() == 1


def test_templates_and_tool_settings_are_saved(operator) -> None:
    environment = make_environment()
    changes = {
        "prompt_format": "jinja",
        "system_prompt": "In {{ workdir }}.",
        "agent_settings": '{"instruction_template": "{{ task.ref }} {{ instruction }}"}',
        "tool_settings": '{"bash": {"timeout_seconds": 5, "description": "Run."}}',
    }

    answer = operator.post(Environment, "change", form_of(environment, **changes), environment.pk)

    assert answer.status_code == 302
    saved = Environment.objects.get(name=environment.name, version=2)
    assert (saved.prompt_format, saved.tool_settings) == (
        "jinja",
        {"bash": {"timeout_seconds": 5, "description": "Run."}},
    )
