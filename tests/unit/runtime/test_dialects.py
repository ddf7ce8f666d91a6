"""Which commands are taken for harmless, and what a report says."""

import pytest

from sandboxes.runtime.dialects import may_change
from sandboxes.runtime.reports import Report, Reports


@pytest.mark.parametrize(
    "command",
    ["true", "/bin/true", "ls -la /usr", " git log --oneline -n 5 ", "./run.sh a=b"],
)
def test_a_simple_command_changes_nothing(command: str) -> None:
    assert not may_change(command)


@pytest.mark.parametrize(
    "command",
    [
        "cd /",
        ". ./env.sh",
        "export A=1",
        "A=1",
        "A=1 ls",
        "ls; cd /",
        "ls && cd /",
        "ls\ncd /",
        "$(cd /)",
        "f() { :; }",
        "time cd /",
        "eval cd /",
        "unset A",
        "printf -v A x",
        "ls # \u00e9",
        "echo {a,b}",
        "",
    ],
)
def test_everything_else_may(command: str) -> None:
    assert may_change(command)


def test_the_newest_whole_report_counts() -> None:
    reports = Reports()
    first, second = "1" * 20, "2" * 20

    reports.feed(f"\x1eB{first}\0posix\0extglob\0exports\0\0\0al".encode())
    before = (reports.newest(), reports.complete(first))
    reports.feed(f"iases\0\0\x1eE{first}\0\x1eB{second}\0set".encode())

    assert before == (None, False)
    assert (reports.complete(first), reports.complete(second)) == (False, False)
    assert reports.newest() == Report("posix", "extglob", "exports", "", "", "aliases", "")
    assert reports.complete(first)


def test_a_report_without_end_is_dropped() -> None:
    reports = Reports()
    token = "3" * 20

    for _ in range(40):
        reports.feed(b"x" * 65536)
    reports.feed(f"\x1eB{token}\0a\0b\0c\0d\0e\0f\0g\0\x1eE{token}\0".encode())

    assert reports.newest() == Report("a", "b", "c", "d", "e", "f", "g")
