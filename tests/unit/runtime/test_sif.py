"""A SIF header is read, and anything else is refused with its path."""

import struct
from pathlib import Path

import pytest

from sandboxes.runtime.exceptions import ImageUnusable
from sandboxes.runtime.sif import Partition, find_root_partition


def sif(kind: int = 0x4004, filesystem: int = 1, part: int = 2, total: int = 1) -> bytes:
    """Return a file as https://github.com/apptainer/sif describes it."""
    header = struct.pack(
        "<32s10s3s3s16s8q",
        b"#!/usr/bin/env run-singularity\n",
        b"SIF_MAGIC\0",
        b"01\0",
        b"02\0",
        b"u" * 16,
        0,
        0,
        0,
        total,
        128,
        585,
        4096,
        8192,
    )
    extra = struct.pack("<ii", filesystem, part).ljust(384, b"\0")
    descriptor = struct.pack(
        "<i?IIIqqqqqqq128s384s", kind, True, 1, 0, 0, 4096, 5000, 8192, 0, 0, 0, 0, b"rootfs", extra
    )
    return header + descriptor


def test_the_root_partition_is_found(tmp_path: Path) -> None:
    path = tmp_path / "a.sif"
    path.write_bytes(sif())

    assert find_root_partition(path) == Partition(offset=4096, size=5000)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "too short"),
        (b"x" * 200, "neither a SIF image"),
        (sif(total=10**9), "descriptors"),
        (sif(kind=0x4001), "no root partition"),
        (sif(part=3), "no root partition"),
        (sif(filesystem=2), "no squashfs"),
        (sif()[:300], "no root partition"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, data: bytes, why: str) -> None:
    path = tmp_path / "a.sif"
    path.write_bytes(data)

    with pytest.raises(ImageUnusable, match=why):
        find_root_partition(path)
