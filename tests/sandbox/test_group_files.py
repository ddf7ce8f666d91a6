"""What is written into the files of both versions of control groups, and where they are found.

The folders here only have the files' names: the kernel's own take part in test_limits.
"""

from pathlib import Path

import pytest

from sandboxes.runtime.account import Account
from sandboxes.runtime.cgroups import Group, entrances
from sandboxes.runtime.delegation import Delegation, enforcement
from sandboxes.runtime.protocol import Limits

UNIFIED = ("memory.max", "memory.swap.max", "memory.oom.group", "pids.max", "cpu.max")
FIRST = (
    "memory.limit_in_bytes",
    "memory.memsw.limit_in_bytes",
    "pids.max",
    "cpu.cfs_period_us",
    "cpu.cfs_quota_us",
)


@pytest.fixture
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    for name in request.param:
        (tmp_path / name).touch()
    return tmp_path


def written(folder: Path, limits: Limits) -> dict[str, str]:
    group = Group(dict.fromkeys(("memory", "pids", "cpu"), str(folder)))
    for file in folder.iterdir():
        file.write_text("")
    group.limit(vars(limits), resting_tasks=12)
    return {file.name: file.read_text() for file in folder.iterdir()}


@pytest.mark.parametrize("folder", [UNIFIED], indirect=True)
def test_version_2_ends_the_group_as_a_whole_and_takes_no_swap(folder: Path) -> None:
    limits = Limits(memory_bytes=1000, processes=30, cpus=1.5)

    assert written(folder, limits) == {
        "memory.max": "1000",
        "memory.swap.max": "0",
        "memory.oom.group": "1",
        "pids.max": "42",
        "cpu.max": "150000 100000",
    }
    assert written(folder, Limits()) == {
        "memory.max": "max",
        "memory.swap.max": "max",
        "memory.oom.group": "1",
        "pids.max": "max",
        "cpu.max": "max 100000",
    }


@pytest.mark.parametrize("folder", [FIRST], indirect=True)
def test_version_1_counts_swap_with_the_memory(folder: Path) -> None:
    few = written(folder, Limits(memory_bytes=1000, processes=30, cpus=0.001))

    assert set(few["memory.limit_in_bytes"].split("1000")) == {""}  # written more than once
    assert set(few["memory.memsw.limit_in_bytes"].split("1000")) == {""}
    assert few["pids.max"] == "42"
    assert (few["cpu.cfs_quota_us"], few["cpu.cfs_period_us"]) == ("1000", "100000")
    assert written(folder, Limits())["cpu.cfs_quota_us"] == "-1"


def test_a_folder_that_is_gone_leaves_its_limit_to_the_watchdog(tmp_path: Path) -> None:
    (tmp_path / "memory").mkdir()
    delegated = {"memory": str(tmp_path / "memory"), "pids": "/proc/nowhere"}

    group = Group.make(delegated, "name")

    assert "memory" in group
    assert "pids" not in group
    assert group.folders == {"memory": str(tmp_path / "memory" / "name")}
    assert entrances(group.folders) == [str(tmp_path / "memory/name/in/cgroup.procs")]


@pytest.mark.parametrize("wanted", ["none", "/proc/nowhere"])
def test_nothing_is_delegated_where_nothing_can_be(tmp_path: Path, wanted: str) -> None:
    account = Account(name="nobody", uid=65534, gid=65534)
    delegation = Delegation(tmp_path, account, wanted)

    found = delegation.folders(None)

    assert found == {}
    assert enforcement(found, delegation.version)["memory"] == "watchdog"
    delegation.close()
