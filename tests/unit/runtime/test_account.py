"""Nobody runs a sandbox as uid 0."""

import os
import pwd

import pytest

from sandboxes.runtime import account
from sandboxes.runtime.account import resolve_account
from sandboxes.runtime.exceptions import RuntimeMissing


def test_an_ordinary_user_stays_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    monkeypatch.setattr(os, "getegid", lambda: 54321)

    found = resolve_account("somebody-else")

    assert (found.name, found.uid, found.gid) == ("12345", 12345, 54321)


def test_root_needs_an_account(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)

    with pytest.raises(RuntimeMissing, match="scripts/install-apptainer"):
        resolve_account("no-such-account-here")
    with pytest.raises(RuntimeMissing, match="uid 0"):
        resolve_account(pwd.getpwuid(0).pw_name)


def test_the_default_account_is_the_installers() -> None:
    assert account.DEFAULT_ACCOUNT == "prorl-sandbox"
