"""Image builds as rows: defined, requested, claimed once, cancelled, recovered, dispatched."""

import json
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import redis
from django.core.exceptions import ValidationError
from django.utils import timezone

from rollouts.services import messages
from rollouts.services.image_builds import dispatch_image_builds
from rollouts.services.node_health import check_images
from sandboxes.images.exceptions import ImageBuildFailed
from sandboxes.models import Image, ImageBuild, Node
from sandboxes.services import image_log
from sandboxes.services.image_claim import (
    MOST_ATTEMPTS,
    SILENT_SECONDS,
    claim_build,
    end_build,
    recover_builds,
)
from sandboxes.services.image_log import BuildLog
from sandboxes.services.image_work import ensure_image
from sandboxes.services.images import (
    cancel_build,
    define_image,
    image_spec,
    request_builds,
    retry_build,
    spec_digest,
    start_build,
)
from sandboxes.states import ImageBuildKind, ImageBuildState
from tests.services.line import make_worker
from tests.services.race import together

pytestmark = pytest.mark.django_db(transaction=True)

SOURCE = "docker://registry.example.org/team/image:1"


@pytest.fixture
def here(settings: Any) -> Node:
    """Return the node that this process is."""
    settings.NODE_NAME = "here"
    return Node.objects.create(name="here", capacity=4, seen_at=timezone.now())


@pytest.fixture
def image() -> Image:
    """Return an image of a registry."""
    return define_image(name="image", source=SOURCE)


def make_operator() -> Any:
    from django.contrib.auth import get_user_model

    return get_user_model().objects.get_or_create(username="operator", is_staff=True)[0]


def make_build(image: Image, node: Node, **columns: Any) -> ImageBuild:
    """Return a queued build; columns are written as they are."""
    build = start_build(image=image, spec=image_spec(image), node=node, kind=ImageBuildKind.PULL)
    if columns:
        ImageBuild.objects.filter(pk=build.pk).update(**columns)
        build.refresh_from_db()
    return build


def state_of(build: ImageBuild) -> str:
    return ImageBuild.objects.values_list("state", flat=True).get(pk=build.pk)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("source", {"source": "-rf"}),
        ("source", {"source": "../escape"}),
        ("source", {"source": "docker://-o/evil"}),
        ("source", {"source": "docker://host/image;reboot"}),
        ("source", {"source": "docker://host/two words"}),
        ("source", {"source": "https://host/image.sif"}),
        ("source", {"source": "template:unknown"}),
        ("source", {"source": "definition:", "definition": "x", "files": {"../x": "y"}}),
        ("definition", {"source": "definition:"}),
        ("definition", {"source": "definition:", "definition": "x" * 300_000}),
        ("reuse", {"source": SOURCE, "reuse": "always"}),
        ("source", {"source": ""}),
    ],
)
def test_what_no_node_could_get_is_refused(field: str, values: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as refused:
        define_image(name="image", **values)

    assert list(refused.value.message_dict) == [field]
    assert not Image.objects.exists()


def test_an_image_made_from_something_else_is_unchecked_again(image: Image) -> None:
    Image.objects.update(state="ready", detail="x", digest="d", checked_at=timezone.now())

    same = define_image(name="image", source=SOURCE)
    changed = define_image(name="image", source=SOURCE, lock="2")

    assert (same.pk, same.state, changed.pk) == (image.pk, "ready", image.pk)
    assert (changed.state, changed.detail, changed.digest) == ("unchecked", "", "")
    assert changed.checked_at is None


def test_builds_are_asked_for_on_nodes_that_are_seen(image: Image, here: Node) -> None:
    other = Node.objects.create(name="other", capacity=4, seen_at=timezone.now())
    gone = Node.objects.create(
        name="gone", capacity=4, seen_at=timezone.now() - timedelta(minutes=10)
    )
    operator = make_operator()

    builds = request_builds(image=image, requested_by=operator)
    named = request_builds(image=image, requested_by=operator, nodes=["gone", "here"])

    assert [build.node for build in builds] == [here, other]
    assert [(b.kind, b.state, b.fresh) for b in builds] == [("pull", "queued", True)] * 2
    assert [build.node for build in named] == [gone, here]
    assert named[1] == builds[0]
    assert ImageBuild.objects.count() == 3


def test_builds_on_unknown_nodes_or_none_are_refused(image: Image) -> None:
    operator = make_operator()

    with pytest.raises(ValidationError, match="No node runs workers"):
        request_builds(image=image, requested_by=operator)
    with pytest.raises(ValidationError, match="no node absent"):
        request_builds(image=image, requested_by=operator, nodes=["absent"])

    assert not ImageBuild.objects.exists()


def test_a_node_has_one_active_build_of_an_image(image: Image, here: Node) -> None:
    builds = together(*[lambda: make_build(image, here)] * 6)

    assert len({build.pk for build in builds}) == 1
    assert ImageBuild.objects.count() == 1


def test_one_worker_claims_a_build(image: Image, here: Node) -> None:
    build = make_build(image, here)

    claims = together(*[lambda: claim_build(build_id=build.pk)] * 6)

    (won,) = [claim for claim in claims if claim is not None]
    build.refresh_from_db()
    assert (build.state, build.lease_token, build.attempts) == ("running", won.token, 1)
    assert build.heartbeat_at is not None


def test_another_nodes_build_is_not_to_be_had(image: Image, here: Node) -> None:
    build = make_build(image, Node.objects.create(name="other", capacity=1))

    assert claim_build(build_id=build.pk) is None
    assert state_of(build) == "queued"


def test_a_node_runs_no_more_builds_than_it_may(here: Node, settings: Any) -> None:
    settings.IMAGE_BUILDS = 2
    images = [define_image(name=f"image-{n}", source=f"{SOURCE}{n}") for n in range(5)]
    builds = [make_build(image, here) for image in images]

    claims = together(*[lambda b=build: claim_build(build_id=b.pk) for build in builds])

    assert len([claim for claim in claims if claim is not None]) == 2
    assert ImageBuild.objects.filter(state="queued").count() == 3


def test_cancel_ends_a_queued_build_and_asks_a_running_one(image: Image, here: Node) -> None:
    queued = make_build(image, here)
    assert cancel_build(build_id=queued.pk) is True
    assert state_of(queued) == "cancelled"
    assert cancel_build(build_id=queued.pk) is False

    running = make_build(image, here)
    claimed = claim_build(build_id=running.pk)
    assert claimed is not None
    log = BuildLog(build_id=running.pk, token=claimed.token)
    assert log.is_ended() is False
    assert cancel_build(build_id=running.pk) is True
    assert state_of(running) == "running"
    log._written_at = 0.0

    assert log.is_ended() is True
    assert (log.cancelled, log.lost) == (True, False)


def test_retry_asks_for_a_build_that_is_over(image: Image, here: Node) -> None:
    operator = make_operator()
    build = make_build(image, here)
    with pytest.raises(ValidationError, match="not over"):
        retry_build(build=build, requested_by=operator)
    cancel_build(build_id=build.pk)
    build.refresh_from_db()

    again = retry_build(build=build, requested_by=operator)

    assert again.pk != build.pk
    assert (again.node, again.kind, again.state) == (here, "pull", "queued")


def silence(build: ImageBuild) -> None:
    then = timezone.now() - timedelta(seconds=SILENT_SECONDS + 5)
    ImageBuild.objects.filter(pk=build.pk).update(heartbeat_at=then)


def test_a_dead_workers_build_is_tried_again_and_then_failed(image: Image, here: Node) -> None:
    build = make_build(image, here)
    for attempt in range(1, MOST_ATTEMPTS + 1):
        claimed = claim_build(build_id=build.pk)
        assert claimed is not None
        assert recover_builds() == 0
        silence(build)

        assert sum(together(recover_builds, recover_builds)) == 1

        assert end_build(claimed=claimed, state=ImageBuildState.SUCCEEDED) is False
        assert state_of(build) == ("queued" if attempt < MOST_ATTEMPTS else "failed")
    build.refresh_from_db()
    assert (build.attempts, build.error_code) == (MOST_ATTEMPTS, "sandbox.image_work_lost")
    assert build.ended_at is not None


def test_a_cancelled_build_of_a_dead_worker_is_cancelled(image: Image, here: Node) -> None:
    build = make_build(image, here)
    claim_build(build_id=build.pk)
    cancel_build(build_id=build.pk)
    silence(build)

    assert recover_builds() == 1
    assert state_of(build) == "cancelled"


def test_a_build_that_no_worker_takes_fails_after_its_time(image: Image, here: Node) -> None:
    build = make_build(image, here, time_limit_seconds=5.0)
    assert recover_builds() == 0
    ImageBuild.objects.update(created_at=timezone.now() - timedelta(seconds=6))

    assert recover_builds() == 1

    build.refresh_from_db()
    assert (build.state, build.error_code) == ("failed", "sandbox.image_no_worker")


def test_the_end_of_a_log_is_kept_and_nul_is_replaced(
    image: Image, here: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_log, "LOG_CHARACTERS", 10)
    build = make_build(image, here)
    claimed = claim_build(build_id=build.pk)
    assert claimed is not None
    log = BuildLog(build_id=build.pk, token=claimed.token)

    log.add("0123456789")
    log.add("ab\x00é")
    log.is_ended()

    build.refresh_from_db()
    assert (build.log, build.log_start) == ("456789ab\N{REPLACEMENT CHARACTER}é", 4)


def test_a_worker_that_lost_its_build_is_told(image: Image, here: Node) -> None:
    build = make_build(image, here)
    claimed = claim_build(build_id=build.pk)
    assert claimed is not None
    log = BuildLog(build_id=build.pk, token=uuid4())

    assert log.is_ended() is True
    assert log.lost
    build.refresh_from_db()
    assert build.log == ""


@pytest.fixture
def broker() -> Any:
    from django.conf import settings

    with redis.Redis.from_url(settings.BROKER_URL) as client:
        assert messages.flush(10)
        client.flushall()
        yield client


def published(broker: Any, queue: str) -> list[list[str]]:
    assert messages.flush(10)
    found = []
    for raw in broker.lrange(queue, 0, -1):
        message = json.loads(raw)
        found.append([message["headers"]["task"], message["headers"]["id"]])
    return found


def test_queued_builds_go_to_nodes_with_free_hands(
    broker: Any, image: Image, settings: Any
) -> None:
    settings.IMAGE_BUILDS = 2
    make_worker("init", node="n1")
    node = Node.objects.get(name="n1")
    idle = Node.objects.create(name="without-workers", capacity=1)
    images = [define_image(name=f"image-{n}", source=f"{SOURCE}{n}") for n in range(4)]
    builds = [make_build(each, node) for each in images]
    make_build(image, idle)
    settings.NODE_NAME = "n1"
    assert claim_build(build_id=builds[0].pk) is not None

    counts = together(dispatch_image_builds, dispatch_image_builds)

    assert sum(counts) == 1
    assert dispatch_image_builds() == 0
    assert [task for task, _ in published(broker, "init.n1")] == ["rollouts.tasks.image_build"]
    assert published(broker, "init.without-workers") == []
    told = ImageBuild.objects.exclude(published_at=None)
    assert [build.pk for build in told] == [builds[1].pk]


def test_a_lost_message_is_sent_again(broker: Any, image: Image, settings: Any) -> None:
    make_worker("init", node="n1")
    build = make_build(image, Node.objects.get(name="n1"))
    assert dispatch_image_builds() == 1
    assert dispatch_image_builds() == 0
    long_ago = timezone.now() - timedelta(seconds=settings.REPUBLISH_SECONDS + 1)
    ImageBuild.objects.filter(pk=build.pk).update(published_at=long_ago)

    assert dispatch_image_builds() == 1
    assert len(published(broker, "init.n1")) == 2


def test_rollouts_do_not_try_what_just_failed_for_good(here: Node, settings: Any) -> None:
    settings.SANDBOX_RUNTIME = "apptainer"
    broken = define_image(name="broken", source="definition:", definition="Bootstrap: docker\n")
    failed = {
        "state": "failed",
        "ended_at": timezone.now(),
        "error_code": "sandbox.image_build_failed",
        "error": "no From",
    }
    make_build(broken, here, **failed)

    with pytest.raises(ImageBuildFailed, match="no From"):
        ensure_image(image=broken, timeout_seconds=60)

    assert ImageBuild.objects.count() == 1
    assert spec_digest(image_spec(broken)) == ImageBuild.objects.get().spec_digest


def test_the_doctor_tells_of_every_kind_of_image(tmp_path: Path, settings: Any, here: Node) -> None:
    settings.IMAGE_ROOT = tmp_path
    settings.SANDBOX_RUNTIME = "apptainer"
    settings.SANDBOX_ACCOUNT = "root-file-systems-need-none"
    (tmp_path / "rootfs" / "bin").mkdir(parents=True)
    (tmp_path / "rootfs" / "bin" / "sh").write_text("")
    Image.objects.bulk_create(
        Image(name=name, source=source)
        for name, source in [
            ("rootfs", "rootfs"),
            ("wrong", "docker://two words"),
            ("empty", "definition:"),
            ("remote", SOURCE),
        ]
    )

    found = {probe.name: probe for probe in check_images()}

    assert {name: probe.ok for name, probe in found.items()} == {
        "image rootfs": True,
        "image wrong": False,
        "image empty": False,
        "image remote": True,
    }
    assert found["image rootfs"].detail == str(tmp_path / "rootfs")
    assert found["image empty"].detail == "definition: needs the text of a definition"
    assert all(probe.remedy for probe in found.values() if not probe.ok)
