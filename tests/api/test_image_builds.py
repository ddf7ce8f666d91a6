"""Image builds over HTTP: asked for, followed, cancelled, by operators only."""

from typing import Any
from uuid import uuid4

import pytest
from django.utils import timezone

from sandboxes.models import Image, ImageBuild, Node
from tests import factories
from tests.api.callers import Caller, assert_problem

pytestmark = pytest.mark.django_db

SOURCE = "docker://registry.example.org/team/image:1"


@pytest.fixture
def image() -> Image:
    return factories.make_image(source=SOURCE)


def make_seen_node(**columns: Any) -> Node:
    return factories.make_node(**{"seen_at": timezone.now(), **columns})


def test_builds_are_asked_for_on_all_nodes_or_some(operator: Caller, image: Image) -> None:
    first, second = make_seen_node(), make_seen_node()

    some = operator.call("POST", f"images/{image.pk}/builds/", {"nodes": [second.name]})
    every = operator.call("POST", f"images/{image.pk}/builds/", {})

    assert (some.status_code, every.status_code) == (202, 202)
    (build,) = some.json()
    assert build == {
        "id": str(ImageBuild.objects.get(node=second).pk),
        "image": image.name,
        "node": second.name,
        "kind": "pull",
        "state": "queued",
        "requested_by": operator.user.username,
        "attempts": 0,
        "time_limit_seconds": 3600.0,
        "digest": "",
        "image_bytes": None,
        "sif_bytes": None,
        "error_code": "",
        "error": "",
        "created_at": build["created_at"],
        "started_at": None,
        "ended_at": None,
    }
    assert [each["node"] for each in every.json()] == sorted([first.name, second.name])
    assert every.json()[sorted([first.name, second.name]).index(second.name)] == build
    listed = operator.call("GET", f"images/{image.pk}/builds/").json()["results"]
    assert {each["id"] for each in listed} == {each["id"] for each in every.json()}


def test_a_check_is_asked_for(operator: Caller, image: Image) -> None:
    make_seen_node()

    asked = operator.call("POST", f"images/{image.pk}/builds/", {"check_only": True})

    assert [each["kind"] for each in asked.json()] == ["check"]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"nodes": ["absent"]}, "nodes"),
        ({"nodes": []}, "nodes"),
        ({"nodes": "all"}, "nodes"),
        ({"force": True}, "force"),
        ({"check_only": "maybe"}, "check_only"),
    ],
)
def test_wrong_requests_make_nothing(
    operator: Caller, image: Image, body: dict[str, Any], field: str
) -> None:
    make_seen_node()

    refused = operator.call("POST", f"images/{image.pk}/builds/", body)

    assert list(assert_problem(refused, 400, "request.invalid")["errors"]) == [field]
    assert not ImageBuild.objects.exists()


def test_without_a_node_or_an_image_nothing_is_made(operator: Caller, image: Image) -> None:
    assert_problem(operator.call("POST", f"images/{image.pk}/builds/", {}), 400, "request.invalid")
    assert_problem(operator.call("POST", f"images/{uuid4()}/builds/", {}), 404, "not_found")
    assert not ImageBuild.objects.exists()


def test_trainers_neither_ask_nor_see_nor_cancel(trainer: Caller, image: Image) -> None:
    build = factories.make_image_build(image=image)

    for method, path in (
        ("POST", f"images/{image.pk}/builds/"),
        ("GET", f"images/{image.pk}/builds/"),
        ("GET", "image-builds/"),
        ("GET", f"image-builds/{build.pk}/"),
        ("POST", f"image-builds/{build.pk}/cancel/"),
    ):
        assert_problem(trainer.call(method, path, {}), 403, "auth.forbidden")

    assert ImageBuild.objects.values_list("state", flat=True).get() == "queued"


def test_a_log_is_read_from_an_offset_on(operator: Caller, image: Image) -> None:
    build = factories.make_image_build(image=image, log="456789", log_start=4)

    def read(offset: str) -> tuple[str, int, int]:
        found = operator.call("GET", f"image-builds/{build.pk}/{offset}").json()
        return found["log"], found["log_start"], found["log_end"]

    assert read("") == ("456789", 4, 10)
    assert read("?offset=2") == ("456789", 4, 10)
    assert read("?offset=7") == ("789", 7, 10)
    assert read("?offset=10") == ("", 10, 10)
    assert read("?offset=99") == ("", 10, 10)
    for wrong in ("?offset=-1", "?offset=x", "?other=1"):
        path = f"image-builds/{build.pk}/{wrong}"
        assert_problem(operator.call("GET", path), 400, "request.invalid")


def test_a_queued_build_is_cancelled_and_one_that_is_over_stays(
    operator: Caller, image: Image
) -> None:
    build = factories.make_image_build(image=image)

    first = operator.call("POST", f"image-builds/{build.pk}/cancel/")
    again = operator.call("POST", f"image-builds/{build.pk}/cancel/")

    assert (first.status_code, first.json()["state"]) == (202, "cancelled")
    assert again.json() == first.json()
    assert first.json()["ended_at"] is not None


def test_builds_are_filtered(operator: Caller, image: Image) -> None:
    build = factories.make_image_build(image=image)
    other = factories.make_image_build()

    def ids(query: str) -> list[str]:
        results = operator.call("GET", f"image-builds/?{query}").json()["results"]
        return [each["id"] for each in results]

    assert ids(f"image={image.name}") == [str(build.pk)]
    assert ids(f"node={other.node.name}") == [str(other.pk)]
    assert ids("state=failed") == []
    assert ids("state=queued&state=running") == [str(other.pk), str(build.pk)]


def test_an_image_is_defined_with_all_that_it_is_made_from(operator: Caller) -> None:
    given = {
        "name": "built",
        "source": "template:",
        "definition": "Bootstrap: docker\nFrom: {{ base }}\n",
        "parameters": {"base": "debian"},
        "files": {"a.txt": "text"},
        "reuse": "lock",
        "lock": "v1",
    }

    created = operator.call("POST", "images/", given)
    shown = operator.call("GET", f"images/{created.json()['id']}/").json()

    assert created.status_code == 201
    assert {key: shown[key] for key in given} == given
    assert (shown["state"], shown["digest"], shown["checked_at"]) == ("unchecked", "", None)
    listed = operator.call("GET", "images/").json()["results"]
    assert listed == [created.json()]
    assert "definition" not in created.json()


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"source": "docker://bad image"}, "source"),
        ({"source": "../x"}, "source"),
        ({"source": "definition:"}, "definition"),
        ({"files": ["x"]}, "files"),
        ({"files": {"/etc/x": "y"}}, "source"),
        ({"reuse": "sometimes"}, "reuse"),
        ({"lock": "x" * 201}, "lock"),
    ],
)
def test_a_wrong_image_is_refused(operator: Caller, changes: dict[str, Any], field: str) -> None:
    refused = operator.call("POST", "images/", {"name": "image", "source": SOURCE, **changes})

    assert list(assert_problem(refused, 400, "request.invalid")["errors"]) == [field]
    assert not Image.objects.exists()
