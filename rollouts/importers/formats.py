"""The formats that tasks are imported from, by name; and which of them a source is in."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from evaluators.base import EvaluatorFault
from evaluators.registry import get_evaluator
from rollouts.importers.base import RejectedTask, TaskRecord, TaskRejected
from rollouts.importers.harbor import read_harbor_folder, read_harbor_task
from rollouts.importers.harbor_registry import is_registry, read_harbor_registry
from rollouts.importers.jsonl import OWN_FIELDS, read_plain_row
from rollouts.importers.nemo_gym import is_nemo_gym, read_nemo_gym_row, server_of
from rollouts.importers.options import ReadOptions
from rollouts.importers.rows import Position, Row, UnreadableSource, file_kind, read_rows
from rollouts.importers.swe import is_swe, read_swe_row
from rollouts.importers.terminal_bench import read_terminal_bench_folder, read_terminal_bench_task
from rollouts.importers.verl import is_verl, read_verl_row

Entries = Iterator[TaskRecord | RejectedTask]
ROWS_LOOKED_AT = 20
REGISTRY = "registry.json"


@dataclass(frozen=True, kw_only=True)
class Item:
    """Hold one task or refusal, and where reading goes on behind it."""

    entry: TaskRecord | RejectedTask
    after: Position
    bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class RowFormat:
    """A format of rows: `matches` tells it by a row, `read` makes a task of one."""

    name: str
    description: str
    matches: Callable[[Mapping[str, Any]], bool]
    read: Callable[[Mapping[str, Any], ReadOptions], TaskRecord]


@dataclass(frozen=True, kw_only=True)
class FolderFormat:
    """A format of folders: `mark` is the file that tells a task's folder."""

    name: str
    description: str
    mark: str
    read: Callable[[Path], Entries]
    read_one: Callable[[Path], TaskRecord] | None = None


ROW_FORMATS = (
    RowFormat(
        name="nemo_gym",
        description="NeMo Gym: responses_create_params and a verifier's fields",
        matches=is_nemo_gym,
        read=read_nemo_gym_row,
    ),
    RowFormat(
        name="swe",
        description="SWE-bench, SWE-Gym, SWE-smith, SWE-rebench, R2E-Gym, SWE-Next, SWE-bench Pro",
        matches=is_swe,
        read=read_swe_row,
    ),
    RowFormat(
        name="verl",
        description="verl: prompt, data_source, reward_model, extra_info",
        matches=is_verl,
        read=read_verl_row,
    ),
    RowFormat(
        name="jsonl",
        description="rows of ref, instruction and answer, or of other columns with a mapping",
        matches=lambda row: "instruction" in row and set(row) <= OWN_FIELDS,
        read=read_plain_row,
    ),
)
FOLDER_FORMATS = (
    FolderFormat(
        name="harbor",
        description="a folder of Harbor task folders (task.toml)",
        mark="task.toml",
        read=read_harbor_folder,
        read_one=read_harbor_task,
    ),
    FolderFormat(
        name="terminal_bench",
        description="a folder of Terminal-Bench 1 task folders (task.yaml)",
        mark="task.yaml",
        read=read_terminal_bench_folder,
        read_one=read_terminal_bench_task,
    ),
    FolderFormat(
        name="harbor_registry",
        description="a registry.json that lists Harbor task folders beside it",
        mark=REGISTRY,
        read=read_harbor_registry,
    ),
)
FORMATS: Mapping[str, RowFormat | FolderFormat] = {
    each.name: each for each in (*FOLDER_FORMATS, *ROW_FORMATS)
}


def detect_format(path: Path, options: ReadOptions) -> str:
    """Return the name of the format of a file or folder.

    Raises `UnreadableSource` that says what was found, OSError.
    """
    if path.is_dir():
        for each in FOLDER_FORMATS:
            if (path / each.mark).is_file() or next(path.glob(f"*/{each.mark}"), None):
                return each.name
        names = ", ".join(sorted(entry.name for entry in islice(path.iterdir(), 5)))
        raise UnreadableSource(f"{path} holds no task folder (it holds: {names or 'nothing'})")
    if _holds_registry(path):
        return "harbor_registry"
    if options.mapping:
        return "jsonl"
    columns: list[str] = []
    for row in islice(read_rows(path), ROWS_LOOKED_AT):
        if row.value is None:
            continue
        columns = columns or sorted(row.value)
        found = next((each.name for each in ROW_FORMATS if each.matches(row.value)), None)
        if found is not None:
            return found
    known = ", ".join(each.name for each in ROW_FORMATS)
    raise UnreadableSource(
        f"{path.name} is in none of the formats {known} (its columns: "
        f"{', '.join(columns[:12]) or 'none'}); name the format, or map its columns"
    )


def read_source(
    path: Path,
    format_name: str,
    options: ReadOptions,
    start: Position | None = None,
    *,
    shown: str = "",
) -> Iterator[Item]:
    """Yield what a source holds, from a position on; `shown` is its name in messages.

    Raises `UnreadableSource` and OSError.
    """
    chosen = FORMATS[format_name]
    begin = start or Position()
    shown = shown or str(path)
    if isinstance(chosen, FolderFormat):
        for number, entry in enumerate(_folder_entries(path, chosen), start=1):
            if number > begin.number:
                told = _with_settings(entry, options)
                after = Position(offset=number, number=number)
                yield Item(entry=told, after=after, bytes=_bytes_of(entry))
        return
    if path.is_dir():
        raise UnreadableSource(f"{shown} is a folder; {format_name} is read from a file")
    if format_name == "nemo_gym" and not options.verifier:
        options = replace(options, verifier=server_of(shown))
    for row in read_rows(path, begin):
        yield Item(entry=read_row(row, chosen, options, shown), after=row.after, bytes=len(row.raw))


def read_row(
    row: Row, chosen: RowFormat, options: ReadOptions, shown: str
) -> TaskRecord | RejectedTask:
    """Return a row's task, or why there is none."""
    reason = row.reason
    if row.value is not None:
        try:
            return chosen.read(row.value, options)
        except TaskRejected as fault:
            reason = str(fault)
        except RecursionError:
            reason = "the row is nested too deep; flatten it"
        except (TypeError, ValueError, AttributeError, LookupError) as fault:
            # A value of a kind that nobody expected: the other rows are none the worse for it.
            reason = f"a value is of no kind that {chosen.name} has there: {str(fault)[:200]}"
    return RejectedTask(path=Path(f"{shown}:{row.number}"), reason=reason, raw=row.raw)


def _folder_entries(path: Path, chosen: FolderFormat) -> Entries:
    if chosen.name == "harbor_registry":
        yield from chosen.read(path / REGISTRY if path.is_dir() else path)
        return
    if not path.is_dir():
        raise UnreadableSource(f"{path.name} is a file; {chosen.name} is read from a folder")
    if chosen.read_one is not None and (path / chosen.mark).is_file():
        try:
            yield chosen.read_one(path)
        except TaskRejected as fault:
            yield RejectedTask(path=path, reason=str(fault))
        return
    yield from chosen.read(path)


def _bytes_of(entry: TaskRecord | RejectedTask) -> int:
    """Return how many bytes the files of a task hold, those that its image is built from too."""
    if isinstance(entry, RejectedTask):
        return len(entry.raw)
    files = sum(
        len(each.data)
        for held in (entry.files, entry.tests, entry.solution)
        for each in held.values()
    )
    built = sum(map(len, entry.build.files.values())) if entry.build else 0
    return files + built


def _with_settings(
    entry: TaskRecord | RejectedTask, options: ReadOptions
) -> TaskRecord | RejectedTask:
    """Return a task with the evaluator's settings of the import, where it has none of its own."""
    if isinstance(entry, RejectedTask) or not options.evaluator_settings:
        return entry
    settings = {**options.evaluator_settings, **entry.evaluator_settings}
    try:
        get_evaluator(entry.evaluator).validate(settings, entry.evaluator_payload)
    except EvaluatorFault as fault:
        return RejectedTask(path=Path(entry.ref), reason=f"with the import's settings: {fault}")
    return replace(entry, evaluator_settings=settings)


def _holds_registry(path: Path) -> bool:
    if path.name != REGISTRY and file_kind(path) != "array":
        return False
    with path.open("rb") as stream:
        data = stream.read(1_000_001)
    try:
        return len(data) <= 1_000_000 and is_registry(json.loads(data))
    except (ValueError, RecursionError):
        return False
