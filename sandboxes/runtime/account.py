"""The account that sandboxes belong to, and the one-way drop to it."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import pwd
import signal
from dataclasses import dataclass

from sandboxes.runtime.exceptions import RuntimeMissing

DEFAULT_ACCOUNT = "prorl-sandbox"

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38
# The number of keyctl(2) and two of its operations; glibc has no function for it.
_KEYCTL = {"x86_64": 250, "aarch64": 219, "riscv64": 219, "ppc64le": 271, "s390x": 280}
_JOIN_SESSION_KEYRING = 1
_SETPERM = 5
_SESSION_KEYRING = -3


@dataclass(frozen=True, kw_only=True)
class Account:
    """Name the user and group that every sandbox process has on the host."""

    name: str
    uid: int
    gid: int


def resolve_account(name: str | None) -> Account:
    """Return the account to run as: `name` for root, the present user otherwise.

    Raises RuntimeMissing when root has no account to drop to: uid 0 never runs a sandbox.
    """
    uid = os.geteuid()
    if uid != 0:
        return Account(name=_user_name(uid), uid=uid, gid=os.getegid())
    wanted = name or DEFAULT_ACCOUNT
    try:
        entry = pwd.getpwnam(wanted)
    except KeyError:
        raise RuntimeMissing(
            f"no account {wanted!r} to run sandboxes as: run scripts/install-apptainer as root"
        ) from None
    if entry.pw_uid == 0:
        raise RuntimeMissing(f"the account {wanted!r} is uid 0, which never runs a sandbox")
    return Account(name=wanted, uid=entry.pw_uid, gid=entry.pw_gid)


def become(uid: int, gid: int) -> None:
    """Turn this process into another user for good; raises PermissionError."""
    os.setgroups([])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
    if os.getresuid() != (uid, uid, uid) or uid == 0:
        raise PermissionError("this process did not leave uid 0")


def forbid_new_privileges() -> None:
    """Set no-new-privs on this process and all that it will start; raises OSError.

    The kernel's keys of whoever started it are privileges too, and are given up.
    """
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _leave_session_keyring()


def adopt_orphans() -> None:
    """Make orphaned descendants children of this process; raises OSError."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_with_parent(parent: int, number: signal.Signals) -> None:
    """Have the kernel send us a signal when our parent ends, which may have been just now."""
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        signal.raise_signal(number)


def _leave_session_keyring() -> None:
    """Take a session keyring of our own, in which nobody can put or find a key.

    Programs inherit it with the possessor's rights, across users and namespaces: the keys of a
    login would be read in every sandbox, and one sandbox's keys in another. See keyrings(7).
    """
    number = _KEYCTL.get(platform.machine())
    if number is None:
        raise OSError(errno.ENOSYS, f"keyctl on {platform.machine()} is not known here")
    try:
        _keyctl(number, _JOIN_SESSION_KEYRING, None, 0)
    except OSError as fault:
        # A kernel without keys, or a container whose filter forbids them to all that we start.
        if fault.errno in (errno.ENOSYS, errno.EPERM):
            return
        raise
    _keyctl(number, _SETPERM, ctypes.c_long(_SESSION_KEYRING), 0)


def _keyctl(number: int, operation: int, first: ctypes.c_long | None, second: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    call = libc.syscall
    call.restype = ctypes.c_long
    if call(ctypes.c_long(number), operation, first, ctypes.c_ulong(second)) < 0:
        found = ctypes.get_errno()
        raise OSError(found, f"keyctl({operation}): {os.strerror(found)}")


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
