"""A reader's own trouble, such as too many open files, is not taken for another's end."""

import errno
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sandboxes.runtime.inside import namespace_members
from sandboxes.runtime.layout import read_record
from sandboxes.runtime.processes import is_running, kill_marked, read_stat


@contextmanager
def no_more_files() -> Iterator[None]:
    """Let every further opening of a file fail with EMFILE."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_process_that_cannot_be_looked_at_has_not_ended(tmp_path: Path) -> None:
    own = read_stat(os.getpid())
    assert own is not None
    record = tmp_path / "record.json"
    record.write_text("{}")
    looks = (
        lambda: read_stat(own.pid),
        lambda: is_running(own.pid, own.start_ticks),
        lambda: namespace_members(own.pid),
        lambda: read_record(record),
        lambda: kill_marked("PRORL_NOBODY=1"),
    )

    found = []
    with no_more_files():
        for look in looks:
            with pytest.raises(OSError) as raised:
                look()
            found.append(raised.value.errno)

    assert found == [errno.EMFILE] * len(looks)
    assert is_running(own.pid, own.start_ticks)
    assert read_record(record) == {}


def test_what_has_ended_is_still_seen_as_ended(tmp_path: Path) -> None:
    child = subprocess.Popen(["/bin/true"])
    child.wait()

    assert read_stat(child.pid) is None
    assert namespace_members(child.pid) == []
    assert read_record(tmp_path / "record.json") is None


def test_the_limit_of_open_files_is_raised_and_what_was_found_is_kept() -> None:
    program = """
import resource
from sandboxes.runtime.open_files import found_file_limit, raise_file_limit
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
before = found_file_limit()
raise_file_limit()
raise_file_limit()
print(before, found_file_limit(), resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard))
"""

    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)

    assert shown.stdout == b"200 200 True\n"
