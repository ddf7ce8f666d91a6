"""Getting images onto this node: carry out builds, for operators and for rollouts that wait."""

import logging
import time
from collections.abc import Callable
from uuid import UUID

from django.conf import settings
from django.db import transaction
from django.db.models import F
from django.utils import timezone

from sandboxes.images.cache import CachedImage
from sandboxes.images.exceptions import (
    PASSING_CODES,
    ImageDiskFull,
    ImageTimeout,
    ImageWorkLost,
    fault_of,
)
from sandboxes.images.specs import ImageSpec
from sandboxes.models import Image, ImageBuild, Node
from sandboxes.runtime.exceptions import (
    ImageMissing,
    ImageUnusable,
    RuntimeMissing,
    SandboxCancelled,
    SandboxFault,
    StopFailed,
)
from sandboxes.runtime.sessions import Cancelled
from sandboxes.services.connections import release_connection
from sandboxes.services.image_check import check_folder
from sandboxes.services.image_claim import Claimed, claim_build, end_build, held_build
from sandboxes.services.image_log import BuildLog
from sandboxes.services.image_store import node_images
from sandboxes.services.images import image_spec, spec_digest, start_build
from sandboxes.states import ImageBuildKind, ImageBuildState, ImageState

logger = logging.getLogger(__name__)

FAILURE_SECONDS = 600.0  # rollouts do not try again what failed for good so recently
_POLL_SECONDS = 0.25
# What says nothing of the image itself: another node, another moment.
_NODE_FAULTS = PASSING_CODES | {
    kind.code
    for kind in (
        *(ImageDiskFull, ImageMissing, ImageTimeout, RuntimeMissing, StopFailed),
        SandboxFault,  # what nobody foresaw
    )
}


def ensure_image(
    *, image: Image, timeout_seconds: float, cancelled: Cancelled | None = None
) -> str:
    """Return what sandboxes of an image start from on this node, got once where it is missing.

    The first rollout that needs it carries the build out; the others wait for its row. When the
    time ends before the build, the build goes on as a job of its own. Raises SandboxCancelled,
    ImageTimeout and the faults of `ImageStore.get`. Holds no connection while it waits or after.
    """
    spec = image_spec(image)
    if settings.SANDBOX_RUNTIME != "apptainer":
        return spec.source
    try:
        return _ensure(image, spec, time.monotonic() + timeout_seconds, cancelled)
    finally:
        release_connection()


def _ensure(image: Image, spec: ImageSpec, deadline: float, cancelled: Cancelled | None) -> str:
    store = node_images()
    node: Node | None = None
    while True:
        found = store.find(spec)
        if found is not None:
            return found.folder
        node = node or Node.objects.get(name=settings.NODE_NAME)
        _raise_known_failure(image, node, spec)
        build = start_build(image=image, spec=spec, node=node, kind=ImageBuildKind(spec.work))
        claimed = claim_build(build_id=build.pk)
        if claimed is not None:
            _Work(claimed, spec, cancelled, deadline).carry_out_for_rollout()
        else:
            _await(build, deadline, cancelled)


def carry_out_build(*, build_id: UUID, stopping: Callable[[], bool]) -> bool:
    """Carry out a queued build of this node to its end; False when it is not to be had.

    When `stopping` turns true the worker ends: the build is given back for another to take.
    """
    claimed = claim_build(build_id=build_id)
    if claimed is None:
        return False
    try:
        spec = image_spec(claimed.build.image)
    except SandboxFault as fault:
        end_build(
            claimed=claimed,
            state=ImageBuildState.FAILED,
            error_code=fault.code,
            error=_text(str(fault)),
        )
        return True
    _Work(claimed, spec, stopping, deadline=None).carry_out()
    return True


def _raise_known_failure(image: Image, node: Node, spec: ImageSpec) -> None:
    """Raise the fault of the last build when it failed for good, recently, on the same image."""
    last = ImageBuild.objects.filter(image=image, node=node).order_by("-created_at").first()
    if last is None or last.state != ImageBuildState.FAILED or last.ended_at is None:
        return
    recent = (timezone.now() - last.ended_at).total_seconds() < FAILURE_SECONDS
    if recent and last.error_code not in _NODE_FAULTS and last.spec_digest == spec_digest(spec):
        raise fault_of(last.error_code, f"{last.error} (build {last.pk})")


def _await(build: ImageBuild, deadline: float, cancelled: Cancelled | None) -> None:
    """Wait until a build is over or can be taken; raises its fault when it failed."""
    release_connection()
    if cancelled is not None and cancelled():
        raise SandboxCancelled("cancelled while waiting for the image")
    if time.monotonic() >= deadline:
        raise ImageTimeout(f"image build {build.pk} is not done yet; it goes on")
    time.sleep(_POLL_SECONDS)
    build.refresh_from_db()
    if build.state == ImageBuildState.FAILED:
        raise fault_of(build.error_code, f"{build.error} (build {build.pk})")


class _Work:
    """One claimed build in the hands of this process."""

    def __init__(
        self,
        claimed: Claimed,
        spec: ImageSpec,
        stopping: Cancelled | None,
        deadline: float | None,
    ) -> None:
        self._claimed = claimed
        self._spec = spec
        self._stopping = stopping
        self._deadline = deadline
        self._out_of_time = False
        self._log = BuildLog(build_id=claimed.build.pk, token=claimed.token)

    def carry_out(self) -> None:
        """Get and check the image, and write down what came of it; never raises its faults."""
        try:
            self._check(self._get())
        except SandboxCancelled:
            self._settle_stop()
        except SandboxFault as fault:
            self._fail(fault)
        except Exception as error:
            logger.exception("image build %s crashed", self._claimed.build.pk)
            self._fail(ImageWorkLost(f"{type(error).__name__}: {error}"))

    def carry_out_for_rollout(self) -> None:
        """Carry it out for the rollout that waits; raises the fault that the build ended with."""
        self.carry_out()
        release_connection()
        if self._out_of_time:
            raise ImageTimeout(f"image build {self._claimed.build.pk} is not done yet; it goes on")
        if self._stopping is not None and self._stopping():
            raise SandboxCancelled("cancelled while the image was made")
        build = ImageBuild.objects.get(pk=self._claimed.build.pk)
        if build.state == ImageBuildState.FAILED:
            raise fault_of(build.error_code, f"{build.error} (build {build.pk})")

    def _get(self) -> CachedImage:
        build = self._claimed.build
        release_connection()
        return node_images().get(
            self._spec,
            timeout_seconds=build.time_limit_seconds,
            again=build.fresh,
            cancelled=self._is_stopping,
            on_log=self._log.add,
        )

    def _is_stopping(self) -> bool:
        if self._deadline is not None and time.monotonic() >= self._deadline:
            self._out_of_time = True
        stop = self._stopping is not None and self._stopping()
        return stop or self._out_of_time or self._log.is_ended()

    def _settle_stop(self) -> None:
        """Write what a stop means: cancelled, given back to the queue, or lost to another."""
        if self._log.lost:
            logger.warning("image build %s is held no longer", self._claimed.build.pk)
        elif self._log.cancelled:
            self._end(ImageBuildState.CANCELLED)
        elif self._deadline is not None and not self._out_of_time:
            # The rollout that needed it was cancelled; others who wait ask for their own.
            self._end(ImageBuildState.CANCELLED)
        else:
            held_build(claimed=self._claimed).update(
                state=ImageBuildState.QUEUED,
                lease_token=None,
                published_at=None,
                attempts=F("attempts") - 1,
            )

    def _check(self, image: CachedImage) -> None:
        self._log.add("== check: starting a sandbox\n")
        release_connection()
        result = check_folder(image.folder, cancelled=self._is_stopping)
        detail = f"{result.detail}; {image.note}" if image.note else result.detail
        self._log.add(f"== {detail}\n")
        sizes = {
            "digest": image.digest,
            "image_bytes": image.image_bytes,
            "sif_bytes": image.sif_bytes,
        }
        if result.ok:
            self._end(ImageBuildState.SUCCEEDED, **sizes)
            self._tell_image(ImageState.READY, detail, image.digest)
        else:
            fault = {"error_code": ImageUnusable.code, "error": _text(detail)}
            self._end(ImageBuildState.FAILED, **fault, **sizes)
            self._tell_image(ImageState.BROKEN, detail, image.digest)

    def _fail(self, fault: SandboxFault) -> None:
        self._end(ImageBuildState.FAILED, error_code=fault.code, error=_text(str(fault)))
        if fault.code not in _NODE_FAULTS:
            self._tell_image(ImageState.BROKEN, str(fault), "")

    def _end(self, state: ImageBuildState, **values: object) -> None:
        log = self._log.values()
        if not end_build(claimed=self._claimed, state=state, **log, **values):
            logger.warning("image build %s is held no longer", self._claimed.build.pk)

    def _tell_image(self, state: ImageState, detail: str, digest: str) -> None:
        """Write the result on the image, unless it was changed meanwhile."""
        build = self._claimed.build
        with transaction.atomic():
            image = Image.objects.select_for_update().filter(pk=build.image_id).first()
            if image is None or spec_digest(image_spec(image)) != spec_digest(self._spec):
                return
            image.state, image.digest, image.checked_at = state, digest, timezone.now()
            image.detail = _text(f"{build.node.name}: {detail}")
            image.save(update_fields=["state", "detail", "digest", "checked_at"])


def _text(text: str) -> str:
    """Return text that a row takes: PostgreSQL refuses NUL."""
    return text.replace("\x00", "\N{REPLACEMENT CHARACTER}")[:4000]
