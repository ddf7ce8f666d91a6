"""The guard of a node's full disk: how long what is being deleted excuses it."""

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sandboxes.runtime import disk, usage
from sandboxes.runtime.disk import PATIENCE_SECONDS
from sandboxes.runtime.inside import View


class Empty:
    def processes(self) -> Iterator[Path]:
        return iter(())


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the clock of the guard: set `now`; the trash is always as fresh as it."""
    made = SimpleNamespace(now=1e9)
    made.time = lambda: made.now
    monkeypatch.setattr(usage, "time", made)
    monkeypatch.setattr(disk, "time", made)
    return made


def test_the_trash_excuses_a_low_disk_for_a_minute_only(
    tmp_path: Path, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    low = [True]
    monkeypatch.setattr(usage, "is_low", lambda _: low[0])
    home = tmp_path / "instances" / "a"
    (home / "upper").mkdir(parents=True)
    (home / "upper" / "file").write_bytes(b"x" * 100_000)
    (tmp_path / "trash" / "old").mkdir(parents=True)  # younger than the clock at every look
    layer = usage._Layer(home, cast(View, Empty()), os.getpid())
    watch = usage._NodeDisk(layer, home, home.parent)

    def reasons() -> list[str]:
        found = []
        for passed in (0, PATIENCE_SECONDS - 1, 1):
            clock.now += passed
            found.append(watch.look()[0])
        return found

    assert reasons() == ["", "", "node_disk"]
    low[0] = False
    assert watch.look()[0] == ""
    low[0] = True
    assert reasons() == ["", "", "node_disk"]  # low again: the excuse begins anew
    (tmp_path / "trash" / "old").rmdir()
    low[0] = False
    watch.look()
    low[0] = True
    assert watch.look()[0] == "node_disk"
