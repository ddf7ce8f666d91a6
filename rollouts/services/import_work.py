"""Carrying an import of tasks out: chunk by chunk, each with its place in one transaction."""

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from django.core.exceptions import ValidationError
from django.db import transaction
from django.db.models import F
from django.db.models.functions import Now

from rollouts.importers.archive import UnsafeArchive
from rollouts.importers.base import RejectedTask, TaskRecord
from rollouts.importers.formats import FORMATS, FolderFormat, Item, detect_format, read_source
from rollouts.importers.options import InvalidOptions, ReadOptions
from rollouts.importers.rows import Position, UnreadableSource, shown, source_total
from rollouts.models import RejectedRow, TaskImport
from rollouts.services.import_claim import (
    BEAT_SECONDS,
    ClaimedImport,
    beat,
    end_import,
    give_back,
    held_import,
)
from rollouts.services.import_sources import forget_upload, open_source
from rollouts.services.task_environments import (
    EnvironmentMaker,
    always,
    need_of,
    refuse_taken_name,
    unmet,
)
from rollouts.services.tasksets import (
    CHUNK,
    EnvironmentOf,
    Written,
    find_or_create_set,
    write_records,
)
from rollouts.states import ImportState
from sandboxes.models import Image

logger = logging.getLogger(__name__)

CHUNK_BYTES = 8_000_000
REJECTED_KEPT = 1000
PLAIN = "jsonl"
REASON_CHARACTERS = 2000

Progress = Callable[[TaskImport], None]


class _Stopped(Exception):
    """Say that the import is cancelled, or held no longer."""


class _Ending(Exception):
    """Say that this process is to end."""


@dataclass
class _Chunk:
    """Items that are written together."""

    records: list[tuple[int, TaskRecord]] = field(default_factory=list)
    refused: list[tuple[int, RejectedTask]] = field(default_factory=list)
    after: Position = field(default_factory=Position)
    bytes: int = 0

    def __len__(self) -> int:
        return len(self.records) + len(self.refused)


def carry_out_import(
    *,
    claimed: ClaimedImport,
    ending: Callable[[], bool] = lambda: False,
    progress: Progress = lambda _job: None,
) -> None:
    """Carry an import out to its end, from where it stands; what came of it is in its row.

    When `ending` turns true it is given back for another process to go on with.
    """
    work = _Work(claimed, ending, progress)
    try:
        work.carry_out()
    except _Stopped:
        end_import(claimed=claimed, state=ImportState.CANCELLED)
    except _Ending:
        give_back(claimed=claimed)
        return
    except (UnreadableSource, UnsafeArchive, InvalidOptions) as fault:
        _fail(claimed, fault.code, str(fault))
    except ValidationError as fault:
        _fail(claimed, "import.refused", "; ".join(fault.messages))
    except OSError as fault:
        _fail(claimed, "import.source_unreadable", f"{claimed.job.name}: {fault.strerror}")
    except Exception as fault:
        logger.exception("import %s crashed", claimed.job.pk)
        _fail(claimed, "import.crashed", f"{type(fault).__name__}: {fault}")
    else:
        end_import(claimed=claimed, state=ImportState.DONE, error_code="", error="")
    forget_upload(job=claimed.job)


def _fail(claimed: ClaimedImport, code: str, error: str) -> None:
    end_import(
        claimed=claimed, state=ImportState.FAILED, error_code=code, error=shown(error[:4000])
    )


class _Work:
    """One claimed import in the hands of this process."""

    def __init__(
        self, claimed: ClaimedImport, ending: Callable[[], bool], progress: Progress
    ) -> None:
        self._claimed = claimed
        self._job = claimed.job
        self._ending = ending
        self._progress = progress
        self._options = ReadOptions.from_dict(claimed.job.options)
        self._images: set[str] = set()
        self._beaten = time.monotonic()

    def carry_out(self) -> None:
        path = open_source(job=self._job, token=self._claimed.token)
        self._prepare(path)
        environment_of = self._environments()
        start = Position(offset=self._job.offset, number=self._job.number)
        chunk = _Chunk(after=start)
        number = start.number
        for item in self._items(path, start):
            self._take(chunk, item)
            number = item.after.number
            if len(chunk) >= CHUNK or chunk.bytes >= CHUNK_BYTES:
                self._write(chunk, environment_of)
                chunk = _Chunk(after=item.after)
            self._breathe()
        self._write(chunk, environment_of)
        if number == 0:
            raise UnreadableSource(f"{self._job.name} holds no task")

    def _prepare(self, path: Path) -> None:
        """Find out format, length and main need, once; they are kept for who goes on."""
        self._images = set(Image.objects.values_list("name", flat=True))
        if not self._job.format:
            self._job.format = detect_format(path, self._options)
        self._inherit()
        if self._job.total is None:
            self._job.total = source_total(path)
        if not self._job.main_need and self._job.environment is None:
            self._job.main_need = self._main_need(path)
        self._job.save(update_fields=["format", "total", "main_need"])

    def _inherit(self) -> None:
        """Let the environment's evaluator score plain rows that name none."""
        environment = self._job.environment
        if environment and self._job.format == PLAIN and not self._options.evaluator:
            self._options = replace(
                self._options,
                evaluator=environment.evaluator,
                evaluator_settings=environment.evaluator_settings,
            )

    def _environments(self) -> EnvironmentOf:
        if self._job.environment is not None:
            return always(self._job.environment)
        refuse_taken_name(set_name=self._job.set_name)
        return EnvironmentMaker(name=self._job.set_name, main=self._job.main_need)

    def _items(self, path: Path, start: Position) -> Iterator[Item]:
        return read_source(path, self._job.format, self._options, start, shown=self._job.name)

    def _main_need(self, path: Path) -> str:
        """Return the digest of the need that most folders have, or that the first row has.

        Folders are read twice for it; of rows there may be millions.
        """
        counts: dict[str, int] = {}
        for item in self._items(path, Position()):
            self._breathe()
            if isinstance(item.entry, RejectedTask) or self._unmet(item.entry):
                continue
            digest = need_of(item.entry).digest
            if not isinstance(FORMATS[self._job.format], FolderFormat):
                return digest
            counts[digest] = counts.get(digest, 0) + 1
        return min(counts, key=lambda digest: (-counts[digest], digest), default="")

    def _unmet(self, record: TaskRecord) -> str:
        return unmet(record, images=self._images, environment=self._job.environment)

    def _take(self, chunk: _Chunk, item: Item) -> None:
        number, entry = item.after.number, item.entry
        chunk.after = item.after
        chunk.bytes += item.bytes
        if isinstance(entry, TaskRecord) and (reason := self._unmet(entry)):
            entry = RejectedTask(path=Path(entry.ref), reason=reason)
        if isinstance(entry, TaskRecord):
            chunk.records.append((number, entry))
        else:
            chunk.refused.append((number, entry))

    def _write(self, chunk: _Chunk, environment_of: EnvironmentOf) -> None:
        """Write a chunk and how far the import is, together or not at all."""
        if not chunk:
            return
        job = self._job
        if isinstance(environment_of, EnvironmentMaker):
            environment_of.recall([record.ref for _number, record in chunk.records])
        with transaction.atomic():
            job.task_set = find_or_create_set(name=job.set_name, description=job.description)
            written = write_records(
                task_set=job.task_set,
                records=[record for _number, record in chunk.records],
                environment_of=environment_of,
                seen_in=job.pk,
            )
            refused = chunk.refused + _refused(chunk, written)
            won = held_import(claimed=self._claimed).update(
                task_set=job.task_set,
                created=F("created") + written.created,
                changed=F("changed") + written.changed,
                unchanged=F("unchanged") + written.unchanged,
                rejected=F("rejected") + len(refused),
                offset=chunk.after.offset,
                number=chunk.after.number,
                attempts=1,
                heartbeat_at=Now(),
            )
            if not won:
                raise _Stopped
            self._keep(refused)
        job.refresh_from_db(fields=["created", "changed", "unchanged", "rejected", "number"])
        job.offset = chunk.after.offset
        self._progress(job)

    def _keep(self, refused: list[tuple[int, RejectedTask]]) -> None:
        """Keep the first refused rows; the others are counted."""
        room = REJECTED_KEPT - self._job.rejected
        RejectedRow.objects.bulk_create(
            [
                RejectedRow(
                    task_import=self._job,
                    number=number,
                    place=shown(str(entry.path)[-500:]),
                    reason=shown(entry.reason[:REASON_CHARACTERS]),
                    raw=entry.raw,
                )
                for number, entry in sorted(refused, key=lambda each: each[0])[: max(0, room)]
            ]
        )

    def _breathe(self) -> None:
        """Show life now and then. Raises `_Stopped` and `_Ending`."""
        if self._ending():
            raise _Ending
        if time.monotonic() - self._beaten < BEAT_SECONDS:
            return
        self._beaten = time.monotonic()
        if not beat(claimed=self._claimed):
            raise _Stopped


def _refused(chunk: _Chunk, written: Written) -> list[tuple[int, RejectedTask]]:
    return [
        (
            chunk.records[place][0],
            RejectedTask(path=Path(chunk.records[place][1].ref), reason=reason),
        )
        for place, reason in written.refused.items()
    ]
