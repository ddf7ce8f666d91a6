"""Where imports read from: what was uploaded, and folders that the operator opened for it."""

import os
import shutil
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path, PurePosixPath
from uuid import UUID

from django.conf import settings
from django.core.exceptions import ValidationError

from rollouts.importers.archive import is_archive, unpack
from rollouts.importers.rows import UnreadableSource
from rollouts.models import TaskImport

UPLOADED, UNPACKED = "upload", "unpacked"
LEFT_SECONDS = 86_400.0  # after it an upload without an import under way is nobody's


class UploadTooLarge(ValidationError):
    """Say that an upload has more bytes than are taken."""


def import_folder(import_id: UUID) -> Path:
    """Return the folder that an import's upload is kept in."""
    return Path(settings.IMPORT_FOLDER) / str(import_id)


def store_upload(*, import_id: UUID, chunks: Iterable[bytes]) -> Path:
    """Write an upload to its folder; return the file. Raises `UploadTooLarge`, ValidationError.

    Nothing is left of one that is not taken.
    """
    folder = import_folder(import_id)
    folder.mkdir(parents=True)
    path, size, limit = folder / UPLOADED, 0, settings.IMPORT_MAX_BYTES
    try:
        with path.open("wb") as out:
            for chunk in chunks:
                size += len(chunk)
                if size > limit:
                    raise UploadTooLarge(
                        f"The upload has more than {limit} bytes: split it, put it below one of "
                        "PRORL_IMPORT_ROOTS, or raise PRORL_IMPORT_MAX_BYTES."
                    )
                out.write(chunk)
            out.flush()
            os.fsync(out.fileno())
        if size == 0:
            raise ValidationError("The upload is empty: send the file as the body.")
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return path


def allowed_path(text: str) -> Path:
    """Return an existing path below one of PRORL_IMPORT_ROOTS; raises ValidationError.

    Links that lead out of it are refused.
    """
    roots = [Path(root) for root in settings.IMPORT_ROOTS]
    if not roots:
        raise ValidationError("No folder is open for imports: set PRORL_IMPORT_ROOTS, or upload.")
    if "\0" in text or ".." in PurePosixPath(text).parts or not text.startswith("/"):
        raise ValidationError("Write an absolute path without '..'.")
    try:
        found = Path(text).resolve(strict=True)
    except (OSError, RuntimeError):
        found = None
    inside = found is not None and any(found.is_relative_to(root.resolve()) for root in roots)
    if found is None or not inside:  # one answer for both: what is elsewhere is nobody's business
        names = ", ".join(map(str, roots))
        raise ValidationError(f"There is no {text} below {names}.")
    return found


def open_source(*, job: TaskImport, token: UUID) -> Path:
    """Return what an import is to read, an archive unpacked. Raises UnreadableSource, OSError.

    Who holds the import under the token unpacks into a folder of its own: whoever had it before
    and was only thought dead never writes into it.
    """
    path = Path(job.path)
    if not path.exists():
        raise UnreadableSource(f"{job.name} is not there; import it again from where it is")
    if path.is_dir() or not is_archive(path):
        return path
    for left in import_folder(job.pk).glob(f"{UNPACKED}-*"):  # by processes that held it before
        shutil.rmtree(left, ignore_errors=True)
    return unpack(path, import_folder(job.pk) / f"{UNPACKED}-{token}")


def forget_upload(*, job: TaskImport) -> None:
    """Delete what an import that is over had uploaded or unpacked; idempotent."""
    if TaskImport.objects.active().filter(pk=job.pk).exists():
        return  # another process goes on with it
    shutil.rmtree(import_folder(job.pk), ignore_errors=True)


def sweep_uploads() -> int:
    """Delete old uploads whose import is over or was never begun; return how many."""
    old: dict[UUID, Path] = {}
    for folder in Path(settings.IMPORT_FOLDER).glob("*"):
        with suppress(ValueError, OSError):  # not an import's, or gone by now
            import_id, parts = UUID(folder.name), [folder, *folder.glob(UPLOADED)]
            if time.time() - max(part.stat().st_mtime for part in parts) > LEFT_SECONDS:
                old[import_id] = folder
    active = set(TaskImport.objects.active().filter(pk__in=old).values_list("pk", flat=True))
    for import_id in old.keys() - active:
        shutil.rmtree(old[import_id], ignore_errors=True)
    return len(old.keys() - active)
