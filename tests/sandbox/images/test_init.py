"""INIT gets an image that the node lacks, once for all rollouts that need it."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from django.db import connection

from rollouts.models import Rollout
from rollouts.services.dispatch import dispatch
from rollouts.stages.initialisation import start_prepared_sandbox
from rollouts.stages.lease import Held
from sandboxes.models import Environment, ImageBuild, Sandbox
from sandboxes.runtime.exceptions import SandboxCancelled
from sandboxes.services.images import define_image
from sandboxes.services.lifecycle import give_up_sandboxes
from sandboxes.services.node import node_runtime, remove_given_up
from tests.sandbox.images.endless import ENDLESS
from tests.sandbox.images.oci import folder_members, push_image
from tests.sandbox.images.test_builds import definition
from tests.sandbox.images.test_work import log_of
from tests.services.line import claim_active, make_group, make_node

pytestmark = [pytest.mark.sandbox, pytest.mark.django_db(transaction=True)]


def claims(image: Any, samples: int) -> list[tuple[Held, Sandbox, Environment]]:
    """Return claimed attempts at INIT of rollouts whose environment names the image."""
    workers = make_node("node")
    group = make_group(samples=samples)
    Environment.objects.update(image=image, setup="", workdir="/")
    assert dispatch() == samples
    found = []
    for rollout in Rollout.objects.filter(group=group):
        claim = claim_active(rollout, workers["init"])
        sandbox = Sandbox.objects.get(owner=rollout.pk)
        environment = Environment.objects.select_related("image").get(pk=rollout.environment_id)
        found.append((Held(claim), sandbox, environment))
    return found


def start(each: tuple[Held, Sandbox, Environment]) -> Any:
    held, sandbox, environment = each
    try:
        return start_prepared_sandbox(
            sandbox=sandbox, environment=environment, payload={}, held=held
        )
    finally:
        connection.close()


def test_an_image_of_a_registry_is_pulled_once_at_init(
    node: Any,
    registry: str,
    rootfs: Path,
    shared: Path,
) -> None:
    reference = push_image(registry, "tests/init:1", [folder_members(rootfs)], shared)
    image = define_image(name="remote", source=f"docker://{reference}")
    wanted = claims(image, 3)

    with ThreadPoolExecutor(3) as pool:
        handles = list(pool.map(start, wanted))

    runtime = node_runtime()
    said = [
        runtime.exec(handle, ["cat", "/hello"], timeout_seconds=60).stdout for handle in handles
    ]
    assert said == [b"from the image\n"] * 3
    assert [(b.state, b.requested_by) for b in ImageBuild.objects.all()] == [("succeeded", None)]
    for _, sandbox, _ in wanted:
        give_up_sandboxes(owner=sandbox.owner)
    assert remove_given_up() == 3


def test_a_cancelled_rollout_ends_its_build(node: Any, sif: Path) -> None:
    text = definition(sif, ENDLESS)
    image = define_image(name="endless", source="definition:", definition=text)
    ((held, sandbox, environment),) = claims(image, 1)

    def cancel_once_it_builds() -> bool:
        build = ImageBuild.objects.first()
        if build is not None and "86398.5" in log_of(build):
            held.cause = "cancelled"
        return held.cause is not None

    held.stopping = cancel_once_it_builds  # type: ignore[method-assign]
    with pytest.raises(SandboxCancelled):
        start((held, sandbox, environment))

    assert ImageBuild.objects.get().state == "cancelled"
    give_up_sandboxes(owner=sandbox.owner)
    assert remove_given_up() == 1
