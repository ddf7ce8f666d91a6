"""Paths that go into an archive."""

import io
import tarfile

import pytest

from sandboxes.runtime.files import clean_path, pack


def test_an_archive_holds_paths_modes_and_contents() -> None:
    with tarfile.open(fileobj=io.BytesIO(pack({"/a/./b/../c": (b"x", 0o100755)}))) as archive:
        (member,) = archive.getmembers()
        extracted = archive.extractfile(member)
        assert extracted is not None
        assert (member.name, member.mode, extracted.read()) == ("a/c", 0o755, b"x")


@pytest.mark.parametrize("path", ["", "/", "a", "../a", "/..", "//", "/a\0b"])
def test_a_path_that_is_no_file_is_refused(path: str) -> None:
    with pytest.raises(ValueError, match="not an absolute path"):
        clean_path(path)


def test_dots_do_not_climb_above_the_root() -> None:
    assert clean_path("/../../etc/x") == "/etc/x"
