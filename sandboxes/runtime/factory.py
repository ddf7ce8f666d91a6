"""Make a runtime by its kind."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal, assert_never

from sandboxes.runtime.account import Account, resolve_account
from sandboxes.runtime.apptainer import ApptainerRuntime
from sandboxes.runtime.argv import Overlay
from sandboxes.runtime.delegation import AUTO
from sandboxes.runtime.exceptions import RuntimeMissing
from sandboxes.runtime.fake import FakeRuntime
from sandboxes.runtime.local import LocalRuntime
from sandboxes.runtime.protocol import Runtime

RuntimeKind = Literal["apptainer", "local", "fake"]


def make_runtime(
    kind: RuntimeKind,
    root: Path,
    prefix: str,
    account: str | None,
    *,
    groups: str = AUTO,
    engine: str = "",
    overlay: Overlay = "auto",
) -> Runtime:
    """Make a runtime over `root`, call it before threads start; `close` it at the end.

    `account` names whom root drops to (None: `prorl-sandbox`) and is not looked at
    otherwise; the options are `ApptainerRuntime`'s. Raises RuntimeMissing.
    """
    match kind:
        case "apptainer":
            apptainer = ApptainerRuntime(
                root,
                prefix,
                resolve_account(account),
                groups=groups,
                engine=engine,
                overlay=overlay,
            )
            apptainer.prepare()
            return apptainer
        case "local":
            local = LocalRuntime(root, prefix, _local_account(account))
            local.prepare()
            return local
        case "fake":
            fake = FakeRuntime(prefix, shared=root)
            fake.prepare()
            return fake
        case _:
            assert_never(kind)


def _local_account(name: str | None) -> Account:
    """Return the account where there is one, else whoever we are: nothing is isolated anyway."""
    try:
        return resolve_account(name)
    except RuntimeMissing:
        return Account(name="root", uid=os.geteuid(), gid=os.getegid())
