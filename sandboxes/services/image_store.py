"""The images that lie on this node, as its services find them."""

from django.conf import settings

from sandboxes.images.store import ImageOptions, ImageStore
from sandboxes.models import Image
from sandboxes.runtime.account import resolve_account
from sandboxes.runtime.exceptions import RuntimeMissing
from sandboxes.services.images import image_spec


def node_images() -> ImageStore:
    """Return this node's images; raises RuntimeMissing where sandboxes have none."""
    if settings.SANDBOX_RUNTIME != "apptainer":
        raise RuntimeMissing(f"the {settings.SANDBOX_RUNTIME} runtime has no images")
    options = ImageOptions(
        image_root=settings.IMAGE_ROOT,
        tmp=settings.APPTAINER_TMPDIR,
        engine_cache=settings.APPTAINER_CACHEDIR,
        insecure_registries=tuple(settings.INSECURE_REGISTRIES),
        cache_bytes=settings.IMAGE_CACHE_BYTES,
        engine_cache_bytes=settings.ENGINE_CACHE_BYTES,
        reserve_bytes=settings.DISK_RESERVE_BYTES,
    )
    return ImageStore(settings.SANDBOX_ROOT, resolve_account(settings.SANDBOX_ACCOUNT), options)


def find_on_node(*, image: Image) -> str | None:
    """Return what sandboxes of an image start from on this node; None where it is not there yet.

    Raises ReferenceInvalid. Notes the use, and starts nothing.
    """
    spec = image_spec(image)
    if settings.SANDBOX_RUNTIME != "apptainer":
        return spec.source
    found = node_images().find(spec)
    return found.folder if found is not None else None
