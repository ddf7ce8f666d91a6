"""The catalogue's pages for files, versions and verifications, with what users wrote inert."""

import json

import pytest
from django.core.files.uploadedfile import SimpleUploadedFile
from django.urls import reverse

from rollouts.models import Experiment, Task, Verification
from sandboxes.models import Environment
from tests import factories
from tests.admin.conftest import messages_of
from tests.admin.test_environments import form_of

pytestmark = pytest.mark.django_db

HOSTILE = '</pre><script>alert("x")</script>\x1b[2J\u202e'
TOML = 'name = "sums"\nagent = "single_turn"\nevaluator = "exact"\nsystem_prompt = "{}"\n'


def page(name: str, *args: object) -> str:
    return reverse(f"admin:sandboxes_environment_{name}", args=args)


def upload(operator, text: bytes | str):
    data = text.encode() if isinstance(text, str) else text
    return operator.client.post(page("import"), {"file": SimpleUploadedFile("e.toml", data)})


def report(**task: object) -> dict[str, object]:
    found = {
        "task": "00000000-0000-0000-0000-000000000001",
        "ref": "t",
        "state": "failed",
        "checks": {"starts": "passed", "setup": "passed", "solution": "failed"},
        "rewards": {"oracle": [0.5, None], "noop": [0.0]},
        "rollouts": {},
        "detail": "",
        "log": "",
        **task,
    }
    seconds = {"init": {"p50": 1.5, "p90": 2.5, "max": 3.5}}
    return {"tasks": [found], "counts": {"failed": 1}, "seconds": seconds}


def test_an_environment_leaves_and_enters_as_a_file(operator) -> None:
    environment = factories.make_environment(image=None, agent="single_turn", setup="one\ntwo\n")

    answer = operator.client.get(page("export", environment.pk))

    assert answer["Content-Disposition"] == f'attachment; filename="{environment.name}-1.toml"'
    again = upload(operator, answer.content)
    assert again.url == page("change", environment.pk)
    assert Environment.objects.count() == 1
    made = upload(operator, TOML.format("x"))
    assert messages_of(made)[-1] == "sums@1 is what the file describes."


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"\xff", "It is no text in UTF-8."),
        ("name =", "It is no TOML"),
        (TOML.format("") + '"<b>" = 1', "&lt;b&gt; is no key of an environment"),
    ],
)
def test_a_wrong_file_is_told_and_nothing_is_made(operator, text: bytes | str, said: str) -> None:
    answer = upload(operator, text)

    assert (answer.status_code, said in answer.content.decode()) == (200, True)
    assert Environment.objects.count() == 0


def test_versions_are_compared_and_what_they_hold_cannot_act(operator) -> None:
    name = factories.unique("e")
    first = factories.make_environment(name=name, version=1, setup="one\ntwo")
    second = factories.make_environment(name=name, version=2, setup=f"one\n{HOSTILE}")
    third = factories.make_environment(name=name, version=3, setup="one")

    shown = operator.client.get(page("diff", second.pk)).content.decode()

    assert '<span class="removed">- two</span>' in shown
    assert "&lt;/pre&gt;&lt;script&gt;alert(&quot;x&quot;)&lt;/script&gt;\\x1b[2J\\u202e" in shown
    assert "<script>alert" not in shown
    against = operator.client.get(f"{page('diff', first.pk)}?against={third.pk}").content.decode()
    assert '<span class="added">+ two</span>' in against
    only = factories.make_environment()
    assert "is the only version" in operator.client.get(page("diff", only.pk)).content.decode()
    odd = operator.client.get(f"{page('diff', second.pk)}?against={HOSTILE}")
    assert (odd.status_code, b"<script>alert" in odd.content) == (200, False)


def test_pages_need_their_permission(client) -> None:
    from django.contrib.auth import get_user_model

    client.force_login(get_user_model().objects.create_user("helper", is_staff=True))
    environment = factories.make_environment()

    for address in (page("export", environment.pk), page("diff", environment.pk), page("import")):
        assert client.get(address).status_code == 403
    assert client.post(page("import"), {}).status_code == 403


def test_files_and_secrets_are_edited_and_an_empty_box_is_none(operator) -> None:
    first = factories.make_environment(
        image=None, agent="single_turn", files={"a": {"base64": "eA==", "mode": 420}}
    )
    secrets = {"T": {"from": "env:T", "to": ["tools"]}}

    given = form_of(first, files="", secrets=json.dumps(secrets))
    assert operator.post(Environment, "change", given, first.pk).status_code == 302
    second = Environment.objects.get(name=first.name, version=2)
    assert (second.files, second.secrets) == ({}, secrets)

    wrong = form_of(second, secrets='{"T": {"from": "hunter2", "to": ["tools"]}}')
    answer = operator.post(Environment, "change", wrong, second.pk)
    assert "never the value" in answer.content.decode()
    assert Environment.objects.count() == 2


def test_versions_are_verified_from_the_list(operator) -> None:
    environment, empty = factories.make_environment(), factories.make_environment()
    factories.make_task(environment=environment)

    said = operator.act(Environment, "verify", environment, empty)

    assert "1 done" in said or "done" in said
    verification = Verification.objects.get()
    assert (verification.environment, verification.requested_by.username) == (
        environment,
        "operator",
    )
    assert "running already" not in said
    again = operator.act(Environment, "verify", environment)
    assert "runs already" in again
    assert Verification.objects.count() == 1


def test_the_list_tells_what_was_found_and_leads_to_it(operator) -> None:
    broken = factories.make_environment(verification="broken")
    factories.make_environment()

    shown = operator.get(Environment, query="?verification__exact=broken").content.decode()

    assert f'?environment__id__exact={broken.pk}"><strong style="color:#ba2121">broken' in shown
    assert operator.get(Environment, "change", broken.pk).status_code == 200
    listed = operator.get(Verification, query=f"?environment__id__exact={broken.pk}")
    assert listed.status_code == 200


def test_a_report_is_read_and_what_solutions_print_cannot_act(operator) -> None:
    verification = factories.make_verification(
        state="done",
        verdict="broken",
        ended_at="2026-01-01T00:00:00Z",
        report=report(ref=HOSTILE, log=HOSTILE, detail="evaluator.timeout: late"),
    )

    shown = operator.get(Verification, "change", verification.pk).content.decode()

    assert "<script>alert" not in shown
    assert "evaluator.timeout: late" in shown
    assert "oracle 0.5, -; noop 0" in shown
    assert "median 1.5 s, 90 % within 2.5 s, longest 3.5 s" in shown
    assert '<strong style="color:#ba2121">failed</strong>' in shown


def test_one_that_runs_is_cancelled(operator) -> None:
    verification = factories.make_verification()

    operator.act(Verification, "cancel", verification)

    verification.refresh_from_db()
    assert verification.state == "cancelled"
    assert "ended already" in operator.act(Verification, "cancel", verification)


def test_an_experiment_on_what_is_broken_must_be_allowed(operator) -> None:
    task = factories.make_task(environment=factories.make_environment(verification="broken"))
    policy = factories.make_policy()
    given = {
        "name": "e",
        "owner": policy.pk,
        "policy": policy.pk,
        "task_sets": [task.task_set_id],
        "group_size": 2,
        "max_attempts": 3,
        "failure_reward": 0,
        "priority": 0,
        "share": 1,
        "feed": "push",
        "on_policy_lag": "cut",
        **dict.fromkeys(("sampling", "budgets", "feed_settings", "selection"), "{}"),
        "filters": "[]",
    }
    given["owner"] = operator.get(Experiment, "add").wsgi_request.user.pk

    refused = operator.post(Experiment, "add", given)

    assert task.environment.ref in refused.content.decode()
    assert Experiment.objects.count() == 0
    assert operator.post(Experiment, "add", {**given, "allow_broken": "on"}).status_code == 302
    assert Experiment.objects.get().allow_broken is True


def test_flaky_tasks_are_marked_and_filtered(operator) -> None:
    flaky = factories.make_task(content_hash="a", flaky_hash="a", flaky_evidence={"rewards": [1]})
    factories.make_task(content_hash="b", flaky_hash="a")

    for query, count in (("", 2), ("?flaky=yes", 1), ("?flaky=no", 1)):
        assert operator.get(Task, query=query).context["cl"].result_count == count
    assert "rewards" in operator.get(Task, "change", flaky.pk).content.decode()


def test_a_verifications_experiment_is_shown_and_not_edited(operator) -> None:
    experiment = factories.make_verification().experiment

    assert operator.get(Experiment).status_code == 200
    shown = operator.get(Experiment, "change", experiment.pk)
    assert (shown.status_code, b'name="_save"' in shown.content) == (200, False)
    assert operator.post(Experiment, "change", {"name": "x"}, experiment.pk).status_code == 403
