"""Find the squashfs partition in a SIF file.

Format: https://github.com/apptainer/sif, docs/spec: a 128-byte header, then descriptors.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

from sandboxes.runtime.exceptions import ImageUnusable

_HEADER = struct.Struct("<32s10s3s3s16sqqqqqqqq")
# type, used, id, group, link, offset, size, size with padding, ctime, mtime, uid, gid, name, extra
_DESCRIPTOR = struct.Struct("<i?IIIqqqqqqq128s384s")
_PARTITION = 0x4004
_SQUASHFS = 1
_PRIMARY_SYSTEM = 2
_MAX_DESCRIPTORS = 4096


@dataclass(frozen=True, kw_only=True)
class Partition:
    """Hold where a partition lies in its file, in bytes."""

    offset: int
    size: int


def find_root_partition(path: Path) -> Partition:
    """Return the primary squashfs partition; raises ImageUnusable, OSError."""
    with path.open("rb") as stream:
        header = stream.read(_HEADER.size)
        if len(header) < _HEADER.size:
            raise ImageUnusable(f"{path} is too short for a SIF image")
        fields = _HEADER.unpack(header)
        if not fields[1].startswith(b"SIF_MAGIC"):
            raise ImageUnusable(f"{path} is neither a SIF image nor an unpacked folder")
        total, offset = fields[8], fields[9]
        if not 0 < total <= _MAX_DESCRIPTORS:
            raise ImageUnusable(f"{path} says it has {total} descriptors")
        stream.seek(offset)
        table = stream.read(total * _DESCRIPTOR.size)
    for start in range(0, len(table) - _DESCRIPTOR.size + 1, _DESCRIPTOR.size):
        entry = _DESCRIPTOR.unpack_from(table, start)
        if entry[0] != _PARTITION or not entry[1]:
            continue
        filesystem, kind = struct.unpack_from("<ii", entry[13])
        if kind == _PRIMARY_SYSTEM:
            if filesystem != _SQUASHFS:
                raise ImageUnusable(f"the root partition of {path} is no squashfs")
            return Partition(offset=entry[5], size=entry[6])
    raise ImageUnusable(f"{path} has no root partition")


def check_complete(path: Path, partition: Partition) -> None:
    """Raise ImageUnusable when a file ends before its partition does; raises OSError."""
    size = path.stat().st_size
    if partition.offset < 0 or partition.size <= 0 or partition.offset + partition.size > size:
        raise ImageUnusable(
            f"{path} is cut off: {size} bytes, of {partition.offset + partition.size} it names"
        )
