"""The account that sandboxes belong to, and the one-way drop to it."""

from __future__ import annotations

import ctypes
import os
import pwd
from dataclasses import dataclass

from sandboxes.runtime.exceptions import RuntimeMissing

DEFAULT_ACCOUNT = "prorl-sandbox"

_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38


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
    """Set no-new-privs on this process and all that it will start; raises OSError."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def adopt_orphans() -> None:
    """Make orphaned descendants children of this process; raises OSError."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


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
