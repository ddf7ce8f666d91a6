"""How the pages look: readable columns, times to the second, JSON in lines, inert texts."""

import re
from datetime import UTC, datetime

import pytest
from django.contrib.staticfiles import finders

from rollouts.models import (
    Attempt,
    Batch,
    Evaluation,
    Experiment,
    Group,
    InferenceServer,
    JournalEntry,
    Policy,
    Rollout,
    Worker,
)
from sandboxes.admin.shown import MAX_LINE, line, pretty
from sandboxes.models import Environment, Image, Node, Sandbox
from tests.admin.conftest import address
from tests.admin.factories import (
    make_attempt,
    make_batch,
    make_environment,
    make_evaluation,
    make_experiment,
    make_group,
    make_image,
    make_journal_entry,
    make_node,
    make_policy,
    make_rollout,
    make_sandbox,
    make_server,
    make_worker,
)

pytestmark = pytest.mark.django_db

ACTING = "red\x1b[31m \u202egnp.exe <script>alert(1)</script>"
INERT = "red\\x1b[31m \\u202egnp.exe &lt;script&gt;alert(1)&lt;/script&gt;"
MOMENT = datetime(2026, 1, 2, 13, 4, 5, 678, tzinfo=UTC)


def content_of(answer) -> str:
    """Return the main part of a page: what stands beside the navigation."""
    page = answer.content.decode()
    assert answer.status_code == 200
    return page[page.index('<div id="content"') :]


def link(row: object, text: object) -> str:
    return f'<a href="{address(type(row), "change", row.pk)}">{text}</a>'


def short(row: object) -> str:
    return f'<code title="{row.pk}">{str(row.pk)[:8]}</code>'


def test_the_site_has_its_own_name_and_no_link_to_itself(operator) -> None:
    page = operator.client.get("/admin/").content.decode()

    assert "<title>Operation | Rollout service</title>" in page
    assert "Django" not in page
    assert "View site" not in page


def test_every_style_sheet_and_script_of_a_page_exists(operator) -> None:
    pages = (operator.get(Rollout), operator.get(Experiment, "add"), operator.get(Policy, "add"))

    found = {
        path
        for page in pages
        for path in re.findall(r'(?:href|src)="/static/([^"]+)"', page.content.decode())
    }

    assert "sandboxes/admin.css" in found
    assert {path for path in found if finders.find(path) is None} == set()


def test_a_list_shows_short_ids_links_and_times_to_the_second(operator) -> None:
    rollout = make_rollout()
    Rollout.objects.filter(pk=rollout.pk).update(created_at=MOMENT)

    page = content_of(operator.get(Rollout))

    assert short(rollout) in page
    assert link(rollout.experiment, rollout.experiment.name) in page
    assert (
        '<time datetime="2026-01-02T13:04:05.000678+00:00" title="UTC">2026-01-02 13:04:05</time>'
    ) in page


def test_the_list_of_attempts_leads_to_the_rollout_and_the_worker(operator) -> None:
    attempt = make_attempt()

    page = content_of(operator.get(Attempt))

    assert link(attempt.rollout, short(attempt.rollout)) in page
    assert link(attempt.worker, "run:4242") in page
    assert link(attempt.worker, "run:4242") in content_of(
        operator.get(Attempt, "change", attempt.pk)
    )


def test_a_sandbox_leads_to_its_rollout(operator) -> None:
    rollout = make_rollout()
    sandbox = make_sandbox(owner=rollout.pk)

    for page in (operator.get(Sandbox), operator.get(Sandbox, "change", sandbox.pk)):
        assert link(rollout, short(rollout)) in content_of(page)


def test_a_column_of_times_sorts_its_list(operator) -> None:
    early, late = make_node(name="b", seen_at=MOMENT), make_node(name="a")
    Node.objects.filter(pk=late.pk).update(seen_at=MOMENT.replace(year=2027))
    place = operator.get(Node).context["cl"].list_display
    number = [getattr(name, "__name__", name) for name in place].index("seen_at")

    rows = operator.get(Node, query=f"?o={number}").context["cl"].queryset

    assert list(rows) == [early, late]


def test_the_counts_of_filters_are_not_offered(operator) -> None:
    make_rollout()

    page = operator.get(Rollout, query="?_facets=True").content.decode()

    assert "Show counts" not in page
    assert "Hide counts" not in page


@pytest.mark.parametrize("digits", [8, 12, 20, 36])
def test_a_row_is_found_by_the_beginning_of_its_id(operator, digits) -> None:
    rollout = make_rollout()
    make_rollout()

    found = operator.get(Rollout, query=f"?q={str(rollout.pk)[:digits]}").context["cl"].queryset

    assert list(found) == [rollout]


@pytest.mark.parametrize("term", ["abc", "0x1234567", "12345678_", "1" * 33])
def test_what_begins_no_id_finds_nothing(operator, term) -> None:
    make_rollout()

    assert operator.get(Rollout, query=f"?q={term}").context["cl"].result_count == 0


@pytest.mark.parametrize(
    ("make", "model", "times"),
    [
        (make_attempt, Attempt, ["created_at", "started_at", "ended_at"]),
        (make_batch, Batch, ["created_at"]),
        (make_group, Group, ["created_at"]),
        (make_sandbox, Sandbox, ["created_at"]),
        (make_worker, Worker, ["started_at"]),
        (make_evaluation, Evaluation, ["created_at"]),
        (make_journal_entry, JournalEntry, ["created_at"]),
    ],
)
def test_a_page_names_its_row_and_when_it_was_made(operator, make, model, times) -> None:
    row = make()
    model.objects.filter(pk=row.pk).update(**dict.fromkeys(times, MOMENT))

    page = content_of(operator.get(model, "change", row.pk))

    assert f'<div class="readonly">{row.pk}</div>' in page
    assert page.count("2026-01-02 13:04:05</time>") == len(times)


def test_hostile_texts_are_inert_wherever_they_are_shown(operator) -> None:
    attempt = make_attempt(failure_detail=ACTING)
    evaluation = make_evaluation()
    Evaluation.objects.filter(pk=evaluation.pk).update(log=ACTING, details={"said": ACTING})
    image = make_image()
    Image.objects.filter(pk=image.pk).update(detail=ACTING)
    server = make_server()
    InferenceServer.objects.filter(pk=server.pk).update(detail=ACTING)

    shown = [
        content_of(operator.get(type(row), "change", row.pk))
        for row in (attempt, evaluation, image, server, server.policy)
    ]

    assert [page.count(INERT) for page in shown] == [1, 1, 1, 1, 1]
    # JSON writes control characters out itself; the direction mark is ours.
    assert "red\\u001b[31m \\u202egnp.exe" in shown[1]
    assert all("\u202e" not in page and "<script>alert" not in page for page in shown)


def test_json_is_shown_in_lines_and_lists_of_numbers_in_a_row() -> None:
    assert pretty({"a": {"b": [1, -2.5, 3]}, "c": ["x, 1", 2]}) == (
        '<pre class="shown">{\n'
        "  &quot;a&quot;: {\n"
        "    &quot;b&quot;: [1, -2.5, 3]\n"
        "  },\n"
        "  &quot;c&quot;: [\n"
        "    &quot;x, 1&quot;,\n"
        "    2\n"
        "  ]\n"
        "}</pre>"
    )
    assert (pretty({}), pretty([]), pretty(None)) == ("-", "-", "-")
    assert pretty(0) == '<pre class="shown">0</pre>'


def test_a_long_text_in_a_list_is_one_line() -> None:
    shown = line("word\n" * 100)

    assert shown.startswith("word word")
    assert shown.endswith("…")
    assert len(shown) <= MAX_LINE


def test_json_is_edited_in_lines(operator) -> None:
    experiment = make_experiment(sampling={"temperature": 0.5, "top_p": 1.0})

    page = content_of(operator.get(Experiment, "change", experiment.pk))

    assert "{\n  &quot;top_p&quot;: 1.0,\n  &quot;temperature&quot;: 0.5\n}</textarea>" in page


def test_what_was_typed_and_is_no_json_comes_back_as_it_was(operator) -> None:
    answer = operator.post(Experiment, "add", {"name": "x", "sampling": '{"temperature": }'})

    assert "{&quot;temperature&quot;: }</textarea>" in content_of(answer)


@pytest.mark.parametrize(
    ("model", "absent"),
    [
        (Experiment, ["How it stands", "field-progress", "field-shown", "field-id"]),
        (InferenceServer, ["field-healthy", "field-checked_at", "field-state"]),
        (Environment, ["field-version", "field-created_at"]),
        (Node, ["field-seen_at", "field-sandboxes"]),
    ],
)
def test_a_new_row_has_only_what_is_asked_for(operator, model, absent) -> None:
    page = content_of(operator.get(model, "add"))

    assert [name for name in absent if name in page] == []


def test_an_experiment_leads_to_its_rollouts_groups_and_batches(operator) -> None:
    batch = make_batch()
    make_batch()
    experiment = batch.experiment

    page = content_of(operator.get(Experiment, "change", experiment.pk))

    for model in (Rollout, Group, Batch):
        found = f"{address(model)}?experiment__id__exact={experiment.pk}"
        assert f'href="{found}"' in page
        rows = operator.client.get(found).context["cl"].queryset
        assert [row.experiment_id for row in rows] == [experiment.pk]


def test_an_experiment_is_deleted_only_while_nothing_was_submitted(operator) -> None:
    empty, used = make_experiment(), make_group().experiment

    first = operator.post(Experiment, "delete", {"post": "yes"}, empty.pk)
    second = operator.post(Experiment, "delete", {"post": "yes"}, used.pk)

    assert (first.status_code, second.status_code) == (302, 403)
    assert list(Experiment.objects.all()) == [used]
    assert "delete_selected" not in operator.get(Experiment).content.decode()


def test_a_node_says_in_words_whether_it_is_draining(operator) -> None:
    make_node(name="used")
    make_node(name="drained", draining=True)

    page = content_of(operator.get(Node))

    assert re.findall(r'<td class="field-drained">(\w+)</td>', page) == ["yes", "no"]


def test_the_owner_of_a_policy_is_chosen_here(operator) -> None:
    policy, owner = make_policy(), make_experiment().owner
    form = {"model": policy.model, "tokenizer": policy.tokenizer, "context_tokens": 4096}
    inline = {
        f"{name}-{count}_FORMS": 0
        for name in ("servers", "updates")
        for count in ("TOTAL", "INITIAL")
    }

    operator.post(Policy, "change", {**form, **inline, "owner": owner.pk}, policy.pk)

    policy.refresh_from_db()
    assert (policy.owner, policy.context_tokens) == (owner, 4096)


def test_a_viewer_reads_the_page_of_an_editable_row(client) -> None:
    from django.contrib.auth import get_user_model
    from django.contrib.auth.models import Permission

    user = get_user_model().objects.create_user("viewer", is_staff=True)
    user.user_permissions.add(Permission.objects.get(codename="view_environment"))
    client.force_login(user)
    environment = make_environment(setup=ACTING, limits={"processes": 7})

    page = content_of(client.get(address(Environment, "change", environment.pk)))

    assert INERT in page
    assert "{\n  &quot;processes&quot;: 7\n}" in page
