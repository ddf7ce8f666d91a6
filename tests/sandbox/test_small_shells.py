"""Shells of images without bash: busybox sh and dash keep the same promises, functions apart."""

import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandboxes.runtime.account import resolve_account
from sandboxes.runtime.apptainer import ApptainerRuntime
from sandboxes.runtime.protocol import SandboxHandle, SandboxSpec
from sandboxes.runtime.sessions import ShellSession
from tests.sandbox.conftest import PREFIX, lacking, open_folder

pytestmark = pytest.mark.sandbox


@pytest.fixture(scope="module")
def busybox_image() -> Iterator[Path]:
    """Make an unpacked image of busybox alone; skips (fails in CI) where none is to be had."""
    folder = open_folder("prorl-busybox-")
    unpacked = folder / "package"
    steps = (
        ["apt-get", "download", "-q", "busybox-static"],
        ["sh", "-c", 'dpkg-deb -x busybox-static_*.deb "$1"', "sh", str(unpacked)],
    )
    try:
        folder.chmod(0o777)  # the account of apt writes there
        for step in steps:
            subprocess.run(step, cwd=folder, check=True, capture_output=True, timeout=120)
        folder.chmod(0o755)
    except (OSError, subprocess.SubprocessError) as fault:
        shutil.rmtree(folder)
        lacking(f"no busybox-static package: {fault}")
    yield _make_image(unpacked / "bin" / "busybox", folder / "image")
    shutil.rmtree(folder)


def _make_image(busybox: Path, root: Path) -> Path:
    for name in ("bin", "etc", "proc", "sys", "dev", "tmp", "root", "usr/lib", "var/tmp"):
        (root / name).mkdir(parents=True)
    shutil.copy(busybox, root / "bin" / "busybox")
    applets = subprocess.run([busybox, "--list"], check=True, capture_output=True, text=True)
    for applet in applets.stdout.split():
        if applet != "busybox":
            (root / "bin" / applet).symlink_to("busybox")
    (root / "etc" / "passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    (root / "etc" / "group").write_text("root:x:0:\n")
    meta = root / ".singularity.d"
    scripts = {f"actions/{name}": 'exec "$@"' for name in ("exec", "run", "shell", "start", "test")}
    scripts |= {"runscript": 'exec /bin/sh "$@"', "startscript": "", "env/90-environment.sh": ""}
    for name, text in scripts.items():
        script = meta / name
        script.parent.mkdir(parents=True, exist_ok=True)
        script.write_text(f"#!/bin/sh\n{text}\n")
        script.chmod(0o755)
    (meta / "labels.json").write_text("{}\n")
    account = resolve_account(None)
    for path in [root, *root.rglob("*")]:
        if os.geteuid() == 0:
            os.chown(path, account.uid, account.gid, follow_symlinks=False)
    return root


@pytest.fixture(scope="module", params=["busybox", "dash"])
def handle(
    request: pytest.FixtureRequest, apptainer_runtime: ApptainerRuntime, base_image: Path
) -> Iterator[SandboxHandle]:
    """Keep one sandbox per kind: of busybox alone, and of the base image without its bash."""
    small = request.param == "busybox"
    image = request.getfixturevalue("busybox_image") if small else base_image
    spec = SandboxSpec(name=f"{PREFIX}small-{uuid.uuid4().hex[:8]}", image=str(image))
    started = apptainer_runtime.start(spec, timeout_seconds=60)
    if not small:
        remove = ["rm", "-f", "/bin/bash", "/usr/bin/bash"]
        assert apptainer_runtime.exec(started, remove, timeout_seconds=30).exit_code == 0
    yield started
    apptainer_runtime.stop(spec.name)


@pytest.fixture(params=[True, False], ids=["terminal", "pipes"])
def shell(
    request: pytest.FixtureRequest, apptainer_runtime: ApptainerRuntime, handle: SandboxHandle
) -> Iterator[ShellSession]:
    opened = apptainer_runtime.open_shell(handle, cwd="/usr", terminal=request.param)
    yield opened
    opened.close()


def say(shell: ShellSession, command: str) -> str:
    return shell.run(command, timeout_seconds=30).output


def test_it_is_no_bash_and_answers(shell: ShellSession) -> None:
    first = shell.run('echo "[$BASH_VERSION] $SHELL"; (exit 7)', timeout_seconds=30)
    second = shell.run("cd /tmp; A='two  words'; f() { echo f$1; }", timeout_seconds=30)

    assert (first.output, first.exit_code, first.cwd) == ("[] /bin/sh\n", 7, "/usr")
    assert (second.output, second.exit_code, second.cwd) == ("", 0, "/tmp")
    assert say(shell, 'pwd; echo "$A"; f 1') == "/tmp\ntwo  words\nf1\n"


@pytest.mark.parametrize(
    "command",
    [
        "echo 'no end",
        "cat <<EOF\nno end",
        ")",
        "for i in 1 2; do",
        "echo ${nothing:?no}",
        "set -u; echo $nothing",
        "exec 0<&- 1>&- 2>&-",
        "exec >/dev/null 2>&1; echo hidden",
        "exec 5>&- 7>&- 9>&-",
        "cat",
        "read x",
        "PS1='$ ' PS2=two",
        "IFS=0123456789:/",
        "PATH=",
        "set -x; PS4=+; set +x",
        "kill -INT $$",
        "sleep 1000 &",
        "echo a; sleep 1000",
        "while :; do :; done",
        "trap '' INT; sleep 1000",
        "sh -c \"trap '' INT TERM; sleep 1000\"",
        "head -c 20000 /dev/urandom",
        ": '" + "y" * 200_000 + "'",
        "alias command=true printf=true eval=true",
        "printf() { :; }",
    ],
    ids=lambda text: text[:30],
)
def test_the_next_command_is_right_after(shell: ShellSession, command: str) -> None:
    ended = shell.run(command, timeout_seconds=1.5)
    after = shell.run("echo one; pwd; [ 1 = 2 ]", timeout_seconds=10)

    assert (after.output, after.exit_code, after.cwd) == ("one\n/usr\n", 1, "/usr")
    assert (ended.shell_restarted, after.shell_restarted) == (False, False)


def test_a_fresh_shell_keeps_all_but_functions(shell: ShellSession) -> None:
    say(shell, "cd /tmp; export WORD=\"it's  two\"; alias hi='echo hello'; set -C; f() { :; }")

    lost = shell.run("exit 5", timeout_seconds=10)

    assert lost.exit_code in (5, None)  # a dash cannot say
    assert lost.shell_restarted
    assert say(shell, 'pwd; echo "$WORD"') == "/tmp\nit's  two\n"
    assert say(shell, "hi") == "hello\n"
    assert shell.run("echo x >/dev/../etc/passwd", timeout_seconds=10).exit_code != 0
    assert shell.run("f", timeout_seconds=10).exit_code == 127


def test_a_program_is_typed_at(shell: ShellSession) -> None:
    begun = shell.run("cat", timeout_seconds=30, idle_seconds=0.5, interactive=True)
    shell.send("typed\n", timeout_seconds=30, idle_seconds=0.5)
    ended = shell.send("\x04", timeout_seconds=30)

    assert begun.running
    assert (ended.exit_code, ended.running) == (0, False)
    assert say(shell, "echo next") == "next\n"


def test_files_go_in_and_out(apptainer_runtime: ApptainerRuntime, handle: SandboxHandle) -> None:
    apptainer_runtime.write_file(handle, "/tmp/deep/down/file", b"\0\xff", mode=0o600)

    assert apptainer_runtime.read_file(handle, "/tmp/deep/down/file", max_bytes=10) == b"\0\xff"
