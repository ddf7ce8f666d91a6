"""Image builds on their way to nodes: rows wait, nodes with free hands are told."""

from django.conf import settings
from django.db import transaction
from django.utils import timezone

from rollouts.models import Worker
from rollouts.services.messages import publish_image_build
from rollouts.states import Stage
from sandboxes.models import ImageBuild
from sandboxes.states import ImageBuildState


def dispatch_image_builds() -> int:
    """Publish the queued builds that nodes have hands for; return how many.

    Any number may do it at once: a build is claimed by one worker whatever is published.
    """
    waiting = ImageBuild.objects.waiting(settings.REPUBLISH_SECONDS)
    builds = list(waiting.select_related("node").order_by("created_at"))
    if not builds:
        return 0
    live = Worker.objects.live().filter(stage=Stage.INIT)
    free = dict.fromkeys(live.values_list("node_id", flat=True), settings.IMAGE_BUILDS)
    at_work = ImageBuild.objects.active().filter(node__in=list(free)).exclude(pk__in=waiting)
    for node_id in at_work.values_list("node_id", flat=True):
        free[node_id] -= 1
    count = 0
    for build in builds:
        if free.get(build.node_id, 0) <= 0:
            continue
        free[build.node_id] -= 1
        with transaction.atomic():
            won = ImageBuild.objects.filter(
                pk=build.pk, state=ImageBuildState.QUEUED, published_at=build.published_at
            ).update(published_at=timezone.now())
            if won:
                publish_image_build(build_id=build.pk, node=build.node.name)
                count += 1
    return count
