"""The contract suites once more, started by an ordinary user instead of root.

The sources are copied, and what an ordinary user cannot reach of the interpreter and the image is
made reachable in a mount namespace of its own: a clone may lie below /root.
"""

import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from sandboxes.runtime.account import Account, resolve_account
from tests.sandbox.conftest import REPOSITORY, open_folder

pytestmark = pytest.mark.sandbox

SUITES = ("test_runtime_contract", "test_shell_contract", "test_escapes", "test_leaks")
SETTINGS = """
[pytest]
timeout = 300
addopts = --strict-markers -p no:cacheprovider -p no:django
markers =
    sandbox: needs a real Apptainer and the base image
filterwarnings = error
"""
# Folders, then `--`, then the program. Each folder is put in its place again below an ancestor
# that lets everybody pass; $HOLD keeps them meanwhile.
REACHABLE = """
set -eu
number=0
for folder in "$@"; do
  [ "$folder" != -- ] || break
  number=$((number + 1))
  mkdir -p "$HOLD/$number"
  mount --rbind "$folder" "$HOLD/$number"
done
for ancestor in $ANCESTORS; do
  mount -t tmpfs -o mode=755 tmpfs "$ancestor"
done
umask 022
number=0
while [ "$1" != -- ]; do
  number=$((number + 1))
  mkdir -p "$1"
  mount --rbind "$HOLD/$number" "$1"
  shift
done
shift
exec "$@"
"""


def blocking(folder: Path) -> Path | None:
    """Return the topmost folder on the way that does not let others pass."""
    for step in reversed([folder, *folder.parents]):
        if not step.stat().st_mode & 0o001:
            return step
    return None


class OrdinaryUser:
    """Run programs as the account, which is nobody special, in a folder of its own."""

    def __init__(self, account: Account, folder: Path, needed: Sequence[Path]) -> None:
        self._account = account
        self.folder = folder
        (folder / "hold").mkdir()
        self._needed = [path for path in needed if blocking(path)]
        self._ancestors = {str(blocking(path)) for path in self._needed}

    def run(self, argv: Sequence[str], **env: str) -> "subprocess.CompletedProcess[str]":
        """Run a program to its end, with an environment of its own."""
        assert not any(" " in ancestor for ancestor in self._ancestors)
        drop = [f"--reuid={self._account.uid}", f"--regid={self._account.gid}", "--clear-groups"]
        outer = {"HOLD": str(self.folder / "hold"), "ANCESTORS": " ".join(self._ancestors)}
        inner = [f"{key}={value}" for key, value in env.items()]
        return subprocess.run(
            [
                *("unshare", "--mount", "--propagation", "private", "--"),
                *("/bin/sh", "-c", REACHABLE, "sh", *map(str, self._needed), "--"),
                *("setpriv", *drop, "--", "env", "-i", *inner, *argv),
            ],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            cwd=self.folder,
            env={"PATH": os.environ["PATH"]} | outer,
        )


@pytest.fixture(scope="module")
def user(base_image: Path) -> Iterator[OrdinaryUser]:
    if os.geteuid() != 0:
        pytest.skip("the whole suite runs as an ordinary user already")
    account, folder = resolve_account(None), open_folder("prorl-ordinary-")
    for package in ("sandboxes", "tests/sandbox"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(REPOSITORY / package, folder / package, ignore=ignored)
    shutil.copy(REPOSITORY / "tests" / "__init__.py", folder / "tests")
    (folder / "pytest.ini").write_text(SETTINGS)
    subprocess.run(["chown", "-R", f"{account.uid}:{account.gid}", str(folder)], check=True)
    subprocess.run(["chmod", "-R", "u+rwX", str(folder)], check=True)
    needed = [Path(sys.prefix), Path(sys.base_prefix), base_image]
    yield OrdinaryUser(account, folder, needed)
    shutil.rmtree(folder)


def test_the_program_runs_as_nobody_special(user: OrdinaryUser) -> None:
    program = "import os, sys; print(*os.getresuid(), os.getgroups()); open(sys.argv[1])"

    ended = user.run([sys.executable, "-c", program, "/etc/shadow"])

    uid = resolve_account(None).uid
    assert ended.stdout == f"{uid} {uid} {uid} []\n"
    assert "PermissionError" in ended.stderr
    assert uid != 0


def test_the_contract_holds_for_an_ordinary_user(user: OrdinaryUser, base_image: Path) -> None:
    report = user.folder / "report.xml"
    (user.folder / "tmp").mkdir(mode=0o777)
    (user.folder / "tmp").chmod(0o777)

    ended = user.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-m", "sandbox", f"--junitxml={report}"),
            *(f"--basetemp={user.folder}/base", *(f"tests/sandbox/{name}.py" for name in SUITES)),
        ],
        PATH=os.environ["PATH"],
        LANG="C.UTF-8",
        HOME="/nonexistent",
        TMPDIR=str(user.folder / "tmp"),
        PRORL_BASE_IMAGE=str(base_image),
        PYTHONDONTWRITEBYTECODE="1",
        CI="true",
    )

    assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-2000:]
    cases = ElementTree.parse(report).getroot().iter("testcase")
    ran = [case for case in cases if case.find("skipped") is None]
    assert {case.get("classname") for case in ran} == {f"tests.sandbox.{name}" for name in SUITES}
    assert len(ran) >= 60
    assert list((user.folder / "tmp").glob("prorl-*")) == []
