"""An operator defines images, gets them onto nodes, follows and cancels builds."""

import pytest
from django.utils import timezone

from sandboxes.models import Image, ImageBuild
from tests.admin.conftest import messages_of
from tests.admin.factories import make_image, make_image_build, make_node, unique

pytestmark = pytest.mark.django_db

ACTING = "red\x1b[31m <script>alert(1)</script>"
INERT = "red\\x1b[31m &lt;script&gt;alert(1)&lt;/script&gt;"


def given(**values: str) -> dict[str, object]:
    """Return what the form of an image sends."""
    return {
        "name": unique("image"),
        "source": "docker://registry.example.org/team/image:1",
        "definition": "",
        "files": "{}",
        "parameters": "{}",
        "reuse": "versioned",
        "lock": "",
        **values,
    }


def test_an_image_is_defined_and_a_wrong_one_is_refused(operator) -> None:
    data = given(source="template:", definition="Bootstrap: {{ x }}", parameters='{"x": "scratch"}')

    made = operator.post(Image, "add", data)
    wrong = operator.post(Image, "add", given(source="docker://two words"))

    assert made.status_code == 302
    image = Image.objects.get()
    assert (image.name, image.parameters, image.state) == (
        data["name"],
        {"x": "scratch"},
        "unchecked",
    )
    assert wrong.status_code == 200
    assert "not a docker reference" in wrong.content.decode()


def test_a_changed_image_is_unchecked_again(operator) -> None:
    image = make_image(source="docker://host.example/x:1")
    Image.objects.update(state="ready", detail="fine")

    answer = operator.post(Image, "change", given(source="docker://host.example/x:2"), image.pk)

    assert answer.status_code == 302
    image.refresh_from_db()
    assert (image.source, image.state, image.detail) == (
        "docker://host.example/x:2",
        "unchecked",
        "",
    )


def test_builds_are_asked_for_on_all_nodes_that_are_seen(operator) -> None:
    image, broken = make_image(), make_image()
    Image.objects.filter(pk=broken.pk).update(source="docker://no good")
    nodes = [make_node(seen_at=timezone.now()) for _ in range(2)]
    make_node()

    said = operator.act(Image, "get_on_nodes", image, broken)

    assert said.startswith("Pull or build on all nodes: 1 done, 0 skipped, 1 failed.")
    assert "not a docker reference" in said
    found = ImageBuild.objects.order_by("node__name")
    assert [build.node for build in found] == sorted(nodes, key=lambda node: node.name)
    assert {(b.image, b.kind, b.fresh, b.requested_by.username) for b in found} == {
        (image, "unpack", True, "operator")
    }


def test_a_check_is_asked_for_on_one_node(operator) -> None:
    image, node = make_image(), make_node()
    make_node(seen_at=timezone.now())

    answer = operator.client.post(
        "/admin/sandboxes/image/",
        {"action": "check_on_nodes", "_selected_action": [image.pk], "node": node.name},
    )

    assert messages_of(answer) == [f"Check on {node.name}: 1 done, 0 skipped, 0 failed."]
    build = ImageBuild.objects.get()
    assert (build.node, build.kind, build.fresh) == (node, "check", False)


def test_the_list_offers_the_nodes(operator) -> None:
    make_image()
    node = make_node()

    page = operator.get(Image).content.decode()

    assert f'<option value="{node.name}">' in page
    assert "all nodes" in page


def test_an_images_page_shows_the_latest_build_of_each_node(operator) -> None:
    image = make_image()
    first, second = make_node(), make_node()
    old = make_image_build(image=image, node=first, state="failed", ended_at=timezone.now())
    new = make_image_build(image=image, node=first)
    other = make_image_build(image=image, node=second, state="cancelled", ended_at=timezone.now())

    page = operator.get(Image, "change", image.pk).content.decode()

    for build, text in ((new, "pull queued"), (other, "pull cancelled")):
        assert f'<a href="/admin/sandboxes/imagebuild/{build.pk}/change/">{text}</a>' in page
    assert str(old.pk) not in page


def test_a_builds_page_shows_the_log_and_comes_again_while_it_runs(operator) -> None:
    build = make_image_build(log=ACTING, log_start=7)

    running = operator.get(ImageBuild, "change", build.pk).content.decode()
    ImageBuild.objects.update(state="failed", ended_at=timezone.now(), error=ACTING)
    over = operator.get(ImageBuild, "change", build.pk).content.decode()

    refresh = '<meta http-equiv="refresh" content="2">'
    assert refresh in running
    assert refresh not in over
    assert f"[7 characters before]\n{INERT}" in running
    assert over.count(INERT) == 2
    assert "<script>alert" not in running + over


def test_builds_are_cancelled_and_asked_for_again(operator) -> None:
    queued = make_image_build(node=make_node(seen_at=timezone.now()))

    early = operator.act(ImageBuild, "retry", queued)
    first = operator.act(ImageBuild, "cancel", queued)
    second = operator.act(ImageBuild, "cancel", queued)
    again = operator.act(ImageBuild, "retry", queued)

    assert early.startswith("Ask again: 0 done, 1 skipped, 0 failed.")
    assert first == "Cancel: 1 done, 0 skipped, 0 failed."
    assert second.startswith("Cancel: 0 done, 1 skipped, 0 failed.")
    assert again == "Ask again: 1 done, 0 skipped, 0 failed."
    queued.refresh_from_db()
    made = ImageBuild.objects.exclude(pk=queued.pk).get()
    assert (queued.state, made.state) == ("cancelled", "queued")
    assert (made.image, made.node) == (queued.image, queued.node)


def test_actions_on_builds_need_the_right_to_change_them(operator, django_user_model) -> None:
    build = make_image_build()
    viewer = django_user_model.objects.create(username="viewer", is_staff=True)
    from django.contrib.auth.models import Permission

    viewer.user_permissions.add(Permission.objects.get(codename="view_imagebuild"))
    operator.client.force_login(viewer)

    answer = operator.client.post(
        "/admin/sandboxes/imagebuild/", {"action": "cancel", "_selected_action": [build.pk]}
    )

    assert answer.status_code == 200
    assert 'value="cancel"' not in answer.content.decode()
    build.refresh_from_db()
    assert build.state == "queued"
