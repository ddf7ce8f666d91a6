"""Snapshots and nodes in the admin: what is kept, what can be forgotten, what a node tells."""

import pytest
from django.utils import timezone

from rollouts.models import Group
from sandboxes.models import Node, Snapshot
from tests.admin.factories import make_group, make_node, make_snapshot

pytestmark = pytest.mark.django_db


def test_what_no_group_starts_from_is_deleted_and_the_rest_is_told(operator) -> None:
    used, unused = make_snapshot(), make_snapshot()
    group = make_group()
    Group.objects.filter(pk=group.pk).update(snapshot=used)

    message = operator.act(Snapshot, "forget", used, unused)

    assert list(Snapshot.objects.all()) == [used]
    assert (
        message
        == f"Delete: 1 done, 0 skipped, 1 failed. {used}: an unfinished group starts from it."
    )


def test_deleting_needs_the_permission(client) -> None:
    from django.contrib.auth import get_user_model
    from django.contrib.auth.models import Permission

    user = get_user_model().objects.create_user("viewer", is_staff=True)
    user.user_permissions.add(Permission.objects.get(codename="view_snapshot"))
    client.force_login(user)
    snapshot = make_snapshot()
    path = "/admin/sandboxes/snapshot/"

    assert client.get(path).status_code == 200
    client.post(path, {"action": "forget", "_selected_action": [snapshot.pk]})

    assert Snapshot.objects.filter(pk=snapshot.pk).exists()


def test_a_snapshot_is_found_by_its_own_and_its_rollouts_id(operator) -> None:
    snapshot = make_snapshot()
    make_snapshot()

    for number in (snapshot.pk, snapshot.owner, str(snapshot.owner)[:8]):
        found = operator.get(Snapshot, query=f"?q={number}").context["cl"].queryset
        assert list(found) == [snapshot]


def test_a_snapshots_page_shows_what_it_holds_and_why_it_failed(operator) -> None:
    node = make_node()
    taken = make_snapshot(
        state="ready",
        turn=3,
        node=node,
        layers=["layer-" + "1" * 32],
        workdir="/app/<b>",
        ready_at=timezone.now(),
    )
    failed = make_snapshot(state="failed", detail="sandbox.gone: <script>")

    page = operator.get(Snapshot, "change", taken.pk).content.decode()
    assert "layer-" + "1" * 32 in page
    assert node.name in page
    assert "/app/&lt;b&gt;" in page
    page = operator.get(Snapshot, "change", failed.pk).content.decode()
    assert "sandbox.gone: &lt;script&gt;" in page
    assert "<script>sandbox" not in page


def test_what_a_node_tells_is_shown_and_cannot_be_written(operator) -> None:
    node = make_node(enforcement={"memory": "cgroup v2"}, leaked=41)

    page = operator.get(Node, "change", node.pk).content.decode()
    form = {"name": node.name, "capacity": 9, "enforcement": '{"memory": "none"}', "leaked": 0}
    answer = operator.post(Node, "change", form, node.pk)

    assert "cgroup v2" in page
    assert "41" in operator.get(Node).content.decode()
    assert answer.status_code == 302
    node.refresh_from_db()
    assert (node.capacity, node.enforcement, node.leaked) == (9, {"memory": "cgroup v2"}, 41)
