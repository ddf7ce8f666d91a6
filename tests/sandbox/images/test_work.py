"""Builds as workers carry them out: rows, logs, cancels, waiting rollouts, on real sandboxes."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth import get_user_model
from django.db import connection

from sandboxes.images.exceptions import ImageBuildFailed, ImageTimeout
from sandboxes.models import Image, ImageBuild, Node
from sandboxes.runtime.exceptions import ImageMissing, SandboxCancelled
from sandboxes.services.image_store import find_on_node
from sandboxes.services.image_work import carry_out_build, ensure_image
from sandboxes.services.images import cancel_build, define_image, request_builds
from tests.sandbox.images.endless import ENDLESS, eventually
from tests.sandbox.images.oci import folder_members, push_image
from tests.sandbox.images.test_builds import definition
from tests.services.race import together

pytestmark = [pytest.mark.sandbox, pytest.mark.django_db(transaction=True)]


def never() -> bool:
    return False


def request(image: Image, **options: Any) -> ImageBuild:
    user = get_user_model().objects.get_or_create(username="operator")[0]
    (build,) = request_builds(image=image, requested_by=user, nodes=["node"], **options)
    return build


def carry_out(build: ImageBuild, stopping: Callable[[], bool] = never) -> ImageBuild:
    assert carry_out_build(build_id=build.pk, stopping=stopping) is True
    return ImageBuild.objects.get(pk=build.pk)


def in_background(call: Callable[[], Any]) -> threading.Thread:
    def run() -> None:
        try:
            call()
        finally:
            connection.close()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def log_of(build: ImageBuild) -> str:
    return str(ImageBuild.objects.values_list("log", flat=True).get(pk=build.pk))


def folders(node_root: Path) -> list[str]:
    return sorted(path.name for path in node_root.glob("images/*") if path.is_dir())


def test_a_build_pulls_checks_and_tells_the_image(
    node: Node, registry: str, rootfs: Path, shared: Path, settings: Any
) -> None:
    reference = push_image(registry, "tests/work:1", [folder_members(rootfs)], shared)
    image = define_image(name="pulled", source=f"docker://{reference}")

    build = carry_out(request(image))
    image.refresh_from_db()

    assert (build.state, build.attempts, build.error, build.lease_token) == (
        "succeeded",
        1,
        "",
        None,
    )
    assert folders(settings.SANDBOX_ROOT) == [build.digest]
    assert build.image_bytes is not None
    assert build.image_bytes > 1_000_000
    assert build.sif_bytes
    assert build.log.startswith(f"== pull: docker://{reference}\n")
    assert build.log.endswith("== has sh, tar; lacks bash, python3, git\n")
    assert (image.state, image.digest) == ("ready", build.digest)
    assert image.detail == "node: has sh, tar; lacks bash, python3, git"
    assert image.checked_at is not None
    assert carry_out_build(build_id=build.pk, stopping=never) is False


def test_a_check_looks_at_what_is_there(node: Node, sif: Path) -> None:
    image = define_image(name="checked", source="tiny.sif")
    first = carry_out(request(image))

    second = carry_out(request(image, check_only=True))

    assert (second.state, second.kind, second.digest) == ("succeeded", "check", first.digest)
    assert "== present: " in second.log


def test_the_log_grows_while_it_runs_and_a_cancel_ends_it(
    node: Node, sif: Path, settings: Any
) -> None:
    image = define_image(name="endless", source="definition:", definition=definition(sif, ENDLESS))
    build = request(image)
    thread = in_background(lambda: carry_out(build))
    assert eventually(lambda: "86398.5" in log_of(build))

    assert cancel_build(build_id=build.pk) is True
    thread.join()

    build.refresh_from_db()
    image.refresh_from_db()
    assert (build.state, build.error) == ("cancelled", "")
    assert "86398.5" in build.log
    assert image.state == "unchecked"
    assert folders(settings.SANDBOX_ROOT) == []


def test_a_worker_that_ends_gives_its_build_back(node: Node, sif: Path) -> None:
    image = define_image(name="endless", source="definition:", definition=definition(sif, ENDLESS))
    build = request(image)

    build = carry_out(build, stopping=lambda: "86398.5" in log_of(build))

    assert (build.state, build.attempts, build.published_at) == ("queued", 0, None)


def test_a_broken_definition_makes_the_image_broken(node: Node, sif: Path) -> None:
    image = define_image(
        name="broken", source="definition:", definition=definition(sif, "echo no >&2; exit 4")
    )

    build = carry_out(request(image))
    image.refresh_from_db()

    assert (build.state, build.error_code) == ("failed", "sandbox.image_build_failed")
    assert "exit status 4" in build.error
    assert "no\n" in build.log
    assert image.state == "broken"
    assert image.detail.startswith("node: FATAL")
    with pytest.raises(ImageBuildFailed, match=str(build.pk)):
        ensure_image(image=image, timeout_seconds=60)
    assert ImageBuild.objects.count() == 1


def test_an_image_without_a_working_shell_is_broken(node: Node, rootfs: Path, shared: Path) -> None:
    folder = shared / "shell-less"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "sh").write_text("no program")
    image = define_image(name="shell-less", source="shell-less")

    build = carry_out(request(image))
    image.refresh_from_db()

    assert (build.state, build.error_code) == ("failed", "sandbox.image_unusable")
    assert image.state == "broken"


def test_an_image_that_one_node_lacks_is_not_called_broken(node: Node) -> None:
    image = define_image(name="absent", source="nowhere.sif")

    build = carry_out(request(image))
    image.refresh_from_db()

    assert (build.state, build.error_code) == ("failed", ImageMissing.code)
    assert image.state == "unchecked"


def test_rollouts_that_need_an_image_get_it_built_once(node: Node, sif: Path) -> None:
    text = definition(sif, "echo built > /built")
    image = define_image(name="needed", source="definition:", definition=text)

    assert find_on_node(image=image) is None

    found = together(*[lambda: ensure_image(image=image, timeout_seconds=120)] * 4)

    assert len(set(found)) == 1
    assert (Path(found[0]) / "built").read_text() == "built\n"
    build = ImageBuild.objects.get()
    assert (build.state, build.requested_by, build.kind) == ("succeeded", None, "build")
    assert ensure_image(image=image, timeout_seconds=0) == find_on_node(image=image) == found[0]


def test_the_others_go_on_when_the_first_rollout_is_cancelled(
    node: Node, sif: Path, tmp_path: Path
) -> None:
    text = definition(sif, "sleep 2; echo built > /built")
    image = define_image(name="needed", source="definition:", definition=text)
    results: list[Any] = []

    def first() -> None:
        with pytest.raises(SandboxCancelled):
            ensure_image(
                image=image,
                timeout_seconds=120,
                cancelled=lambda: "sleep 2" in log_of(ImageBuild.objects.earliest("created_at")),
            )

    one = in_background(first)
    assert eventually(lambda: ImageBuild.objects.filter(state="running").exists())
    two = in_background(lambda: results.append(ensure_image(image=image, timeout_seconds=120)))
    one.join()
    two.join()

    assert (Path(results[0]) / "built").read_text() == "built\n"
    states = ImageBuild.objects.order_by("created_at").values_list("state", flat=True)
    assert list(states) == ["cancelled", "succeeded"]


def test_a_rollout_that_waits_is_cancelled(node: Node, sif: Path, settings: Any) -> None:
    settings.IMAGE_BUILDS = 0
    image = define_image(name="needed", source="tiny.sif")
    began = time.monotonic()

    with pytest.raises(SandboxCancelled):
        ensure_image(
            image=image,
            timeout_seconds=120,
            cancelled=lambda: time.monotonic() > began,
        )

    assert ImageBuild.objects.get().state == "queued"


def test_a_build_outlives_the_time_of_the_rollout_that_began_it(node: Node, sif: Path) -> None:
    text = definition(sif, ENDLESS.replace("86398.5", "86398.5; true"))
    image = define_image(name="slow", source="definition:", definition=text)

    with pytest.raises(ImageTimeout, match="it goes on"):
        ensure_image(image=image, timeout_seconds=5)

    build = ImageBuild.objects.get()
    assert (build.state, build.attempts) == ("queued", 0)
    cancel_build(build_id=build.pk)


def test_an_unpacked_image_of_the_account_needs_no_build(node: Node, base_image: Path) -> None:
    image = define_image(name="base", source=str(base_image))

    assert ensure_image(image=image, timeout_seconds=0) == str(base_image)
    assert not ImageBuild.objects.exists()
