"""Enter a namespace of a running instance, from a process made for it."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

_CLONE_NEWUSER = 0x10000000
_CLONE_NEWNET = 0x40000000
_PR_SET_DUMPABLE = 4


def enter_network(pid: int) -> None:
    """Move this process, which must have one thread, into the network of `pid`; raises OSError.

    An ordinary user may enter the network only through the user namespace that owns it.
    """
    paths = ((f"/proc/{pid}/ns/user", _CLONE_NEWUSER), (f"/proc/{pid}/ns/net", _CLONE_NEWNET))
    opened = [(os.open(path, os.O_RDONLY | os.O_CLOEXEC), kind) for path, kind in paths]
    libc = ctypes.CDLL(None, use_errno=True)
    for descriptor, kind in opened:
        if libc.setns(descriptor, kind) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        os.close(descriptor)


def become_root_of_own() -> None:
    """Make this process, which must have one thread, root of a user namespace of its own.

    It keeps its account outside, and no mode of that account's files stops it. Raises OSError.
    """
    uid, gid = os.geteuid(), os.getegid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWUSER) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    # Who left root behind may not write to its own /proc otherwise.
    libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)
    maps = (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1"))
    for name, text in maps:
        Path(f"/proc/self/{name}").write_text(text)
    libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
