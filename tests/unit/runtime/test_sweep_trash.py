"""What killed removals, copies and starts leave is deleted once nobody can be at work on it."""

import socket
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from sandboxes.runtime import jobs, wire
from sandboxes.runtime.layout import Layout


def sweep(layout: Layout) -> wire.Message:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        jobs.sweep_trash(layout, theirs, {"tools": None})
        received = wire.receive(ours)
    assert received is not None
    return received[0]


def test_leftovers_go_when_they_are_old_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = Layout(tmp_path)
    layout.make()
    left = ["trash/abc", "tmp/snapshot-abc", "tmp/start-abc", "tmp/engine"]
    for path in left:
        (tmp_path / path / "diff").mkdir(parents=True)

    def after(seconds: float) -> list[str]:
        now = time.time() + seconds
        monkeypatch.setattr(jobs, "time", SimpleNamespace(time=lambda: now))
        assert sweep(layout) == {"event": "result"}
        return [path for path in left if (tmp_path / path).exists()]

    assert after(jobs.REMOVE_SECONDS - 5) == left
    assert after(jobs.REMOVE_SECONDS + 5) == left[1:]
    assert after(3600 - 5) == left[1:]
    assert after(3600 + 5) == ["tmp/engine"]
