"""The editor on real files of a real sandbox: what stays as it was, and what is refused."""

from __future__ import annotations

import codecs
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rollouts.tools.base import ToolContext, ToolResult
from rollouts.tools.editor import EditorTool
from rollouts.tools.sandbox import EpisodeSandbox
from sandboxes.runtime.apptainer import ApptainerRuntime
from sandboxes.runtime.exceptions import SandboxGone
from sandboxes.runtime.protocol import Runtime, SandboxHandle
from tests.sandbox.conftest import Start, starter

SECONDS = 60.0

pytestmark = pytest.mark.sandbox

Edit = Callable[..., ToolResult]
Shell = Callable[[str], str]


@pytest.fixture(scope="module")
def sandbox(apptainer_runtime: ApptainerRuntime, base_image: Path) -> Iterator[SandboxHandle]:
    """Start one sandbox for the module."""
    made: list[str] = []
    yield starter(apptainer_runtime, str(base_image), made)()
    for name in made:
        apptainer_runtime.stop(name)


def editing(runtime: Runtime, handle: SandboxHandle, **settings: int) -> Edit:
    """Return a function that calls an editor of its own."""
    tool = EditorTool(**settings)
    context = ToolContext(sandbox=EpisodeSandbox(runtime, handle), timeout_seconds=SECONDS)

    def edit(command: str, path: str, **arguments: Any) -> ToolResult:
        return tool.call({"command": command, "path": path, **arguments}, context)

    return edit


@pytest.fixture
def edit(apptainer_runtime: ApptainerRuntime, sandbox: SandboxHandle) -> Edit:
    """Call a new episode's editor."""
    return editing(apptainer_runtime, sandbox)


@pytest.fixture
def shell(apptainer_runtime: ApptainerRuntime, sandbox: SandboxHandle) -> Shell:
    """Run a script in the sandbox and return what it prints."""

    def run(script: str) -> str:
        done = apptainer_runtime.exec(sandbox, ["/bin/sh", "-c", script], timeout_seconds=SECONDS)
        assert done.exit_code == 0, done
        return done.stdout.decode()

    return run


@pytest.fixture
def put(apptainer_runtime: ApptainerRuntime, sandbox: SandboxHandle) -> Callable[..., None]:
    """Write a file of the sandbox."""

    def write(path: str, data: bytes, mode: int = 0o644) -> None:
        apptainer_runtime.write_file(sandbox, path, data, mode=mode)

    return write


@pytest.fixture
def get(apptainer_runtime: ApptainerRuntime, sandbox: SandboxHandle) -> Callable[[str], bytes]:
    """Read a file of the sandbox."""
    return lambda path: apptainer_runtime.read_file(sandbox, path, max_bytes=1_000_000)


def refused(found: ToolResult) -> str:
    """Return what a refusal says."""
    assert found.data["failed"] is True
    return found.content


def done(found: ToolResult) -> str:
    """Return what an answer says."""
    assert found.data["failed"] is False, found.content
    return found.content


def test_a_file_is_made_viewed_edited_and_undone(edit: Edit, get: Any) -> None:
    path = "/app/deep/er/main.py"
    text = "def f():\n    return 1\n"
    assert done(edit("create", path, file_text=text)) == f"{path} is created, with 2 lines."
    assert done(edit("view", path)) == "     1\tdef f():\n     2\t    return 1"
    assert done(edit("view", path, view_range=[2, -1])) == "     2\t    return 1"
    assert done(edit("str_replace", path, old_str="return 1", new_str="x = 1\n    return x")) == (
        f"{path} is edited. Around the change it reads:\n"
        "     1\tdef f():\n     2\t    x = 1\n     3\t    return x"
    )
    assert done(edit("insert", path, insert_line=0, new_str="import os")).endswith(
        "     1\timport os\n     2\tdef f():\n     3\t    x = 1\n     4\t    return x"
    )
    assert get(path) == b"import os\ndef f():\n    x = 1\n    return x\n"
    assert done(edit("undo", path)) == f"The last edit of {path} is undone."
    assert done(edit("undo", path)) == f"The last edit of {path} is undone."
    assert get(path) == text.encode()
    assert done(edit("undo", path)) == f"{path} is removed: its creation is undone."
    assert refused(edit("undo", path)) == f"There is no edit of {path} to undo."
    assert refused(edit("view", path)).startswith(f"{path}: No such file or directory.")


def test_creating_never_overwrites(edit: Edit, put: Any, get: Any, shell: Shell) -> None:
    put("/app/there", b"kept")
    shell("ln -s nowhere /app/dangling")
    assert "exists already, and create does not" in refused(
        edit("create", "/app/there", file_text="x")
    )
    assert "exists already" in refused(edit("create", "/app/dangling", file_text="x"))
    assert refused(edit("create", "/app", file_text="x")) == "/app is a folder."
    assert "Not a directory" in refused(edit("create", "/app/there/x", file_text="x"))
    assert get("/app/there") == b"kept"
    assert shell("ls -A /app/nowhere 2>&1 || true").endswith("No such file or directory\n")


def test_mode_owner_and_links_stay(edit: Edit, shell: Shell) -> None:
    shell(
        "mkdir /app/links && cd /app/links && echo old > one && chmod 751 one && "
        "ln one two && ln -s one three && ln -s /app/links four"
    )
    before = shell("cd /app/links && stat -c '%i %a %u %g %h' one two && readlink three four")
    done(edit("str_replace", "/app/links/four/three", old_str="old", new_str="new"))
    assert shell("cd /app/links && cat one two three") == "new\nnew\nnew\n"
    assert shell("cd /app/links && stat -c '%i %a %u %g %h' one two && readlink three four") == (
        before
    )
    assert shell("ls -A /app/links /tmp | grep -c edit- || true") == "0\n"


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"a\r\nold\r\nb", b"a\r\nnew\r\nline\r\nb"),
        (b"a\nold\r\nb\n", b"a\nnew\r\nline\r\nb\n"),
        (b"old", b"new\nline"),
        (b"caf\xe9 old\n", b"caf\xe9 new\nline\n"),
        (codecs.BOM_UTF8 + b"old\n", codecs.BOM_UTF8 + b"new\nline\n"),
        (
            codecs.BOM_UTF16_LE + "é old\r\n".encode("utf-16-le"),
            codecs.BOM_UTF16_LE + "é new\r\nline\r\n".encode("utf-16-le"),
        ),
        (b"\x0cold\x85\x1c\xe2\x80\xa8\n", b"\x0cnew\nline\x85\x1c\xe2\x80\xa8\n"),
        (b"x" * 300_000 + b"\nold\n", b"x" * 300_000 + b"\nnew\nline\n"),
        (b"old" + b" " * 100_000 + b"\n", b"new\nline" + b" " * 100_000 + b"\n"),
    ],
)
def test_everything_else_stays_byte_for_byte(
    edit: Edit, put: Any, get: Any, data: bytes, expected: bytes
) -> None:
    put("/app/bytes", data)
    done(edit("str_replace", "/app/bytes", old_str="old", new_str="new\nline"))
    assert get("/app/bytes") == expected
    done(edit("undo", "/app/bytes"))
    assert get("/app/bytes") == data


def test_a_file_may_become_shorter_and_empty(edit: Edit, put: Any, get: Any) -> None:
    put("/app/short", b"abc" * 50_000)
    done(edit("str_replace", "/app/short", old_str="abc" * 50_000, new_str=""))
    assert get("/app/short") == b""
    assert done(edit("view", "/app/short")) == "/app/short is empty."
    done(edit("insert", "/app/short", insert_line=0, new_str="x"))
    assert get("/app/short") == b"x\n"


def test_line_ends_and_long_files_are_noted(edit: Edit, put: Any) -> None:
    put("/app/crlf", b"a\r\nb\n")
    assert done(edit("view", "/app/crlf")) == (
        "     1\ta\n     2\tb\n[the lines end with CRLF and LF, mixed]"
    )
    put("/app/long", b"0123456789\n" * 5000)
    shown = done(edit("view", "/app/long")).split("\n")
    assert shown[-1] == ("[lines 1 to 910 of 5000 are shown; view the others with view_range]")
    assert shown[-2] == "   910\t0123456789"


@pytest.mark.parametrize(
    ("span", "words"),
    [
        ([0, 2], "it must be [first, last] with first from 1"),
        ([3, 2], "and last not before it"),
        ([1, 0], "and last not before it"),
        ([3, 4], "/app/three has 2 lines; there is no line 3."),
    ],
)
def test_ranges_that_are_none(edit: Edit, put: Any, span: list[int], words: str) -> None:
    put("/app/three", b"1\n2\n")
    assert words in refused(edit("view", "/app/three", view_range=span))


def test_a_large_file_is_viewed_in_parts_and_not_edited(edit: Edit, shell: Shell) -> None:
    shell("seq 1000000 > /app/large")
    assert done(edit("view", "/app/large", view_range=[900000, 900001])) == (
        "900000\t900000\n900001\t900001\n"
        "[lines 900000 to 900001 of a file of 6888896 bytes are shown; "
        "view others with view_range]"
    )
    assert done(edit("view", "/app/large")).startswith("     1\t1\n     2\t2\n")
    assert "fewer than 1000001 lines" in refused(
        edit("view", "/app/large", view_range=[1_000_001, -1])
    )
    assert refused(edit("str_replace", "/app/large", old_str="2", new_str="")) == (
        "/app/large has 6888896 bytes, and the editor edits files of 4194304 bytes at most; "
        "use sed or a script."
    )
    shell("head -c 5000000 /dev/zero > /app/large")
    assert "binary file of 5000000 bytes" in refused(edit("view", "/app/large"))


def test_an_edit_above_the_size_limit_changes_nothing(
    apptainer_runtime: ApptainerRuntime, sandbox: SandboxHandle, put: Any, get: Any
) -> None:
    edit = editing(apptainer_runtime, sandbox, max_edit_bytes=1000)
    put("/app/limit", b"x\n")
    wanted = "y" * 1000
    assert "1001 bytes" in refused(edit("str_replace", "/app/limit", old_str="x", new_str=wanted))
    assert "1001 bytes" in refused(edit("create", "/app/new", file_text=wanted + "\n"))
    assert get("/app/limit") == b"x\n"
    assert refused(edit("view", "/app/new")).startswith("/app/new: No such file")


def test_folders_are_shown_two_levels_deep(edit: Edit, shell: Shell) -> None:
    shell(
        "mkdir -p /app/tree/b/c/d /app/tree/.hidden /app/tree/empty && cd /app/tree && "
        "touch a .h b/x b/c/y b/.z && ln -s nowhere broken && ln -s b link"
    )
    expected = (
        "/app/tree/ (two levels deep, hidden files excepted)\n"
        "a\nb/\nb/c/\nb/x\nbroken\nempty/\nlink"
    )
    assert done(edit("view", "/app/tree")) == expected
    assert done(edit("view", "/app/tree/")) == expected
    assert done(edit("view", "/app/tree/empty")).endswith("(nothing)")
    assert done(edit("view", "/app/tree/link")).endswith("\nc/\nc/d/\nc/y\nx")
    assert "is a folder; only view" in refused(
        edit("insert", "/app/tree", insert_line=0, new_str="x")
    )


def test_a_folder_with_very_many_names_is_cut(edit: Edit, shell: Shell) -> None:
    shell("mkdir /app/many && cd /app/many && seq -f '%0200g' 100 | xargs touch")
    shown = done(edit("view", "/app/many")).split("\n")
    assert shown[1] == "0" * 199 + "1"
    assert shown[-1] == "[there is more; view the folders one by one, or use ls]"
    assert len(shown) < 100


@pytest.mark.parametrize(
    "name",
    ["-n", "we ird", "new\nline", "quo'te\"s", "$(touch x)", "*", "ü😀", "a;b", "\\", "x\ty"],
)
def test_odd_names_are_names(edit: Edit, shell: Shell, get: Any, name: str) -> None:
    path = f"/app/odd/{name}"
    done(edit("create", path, file_text="one\n"))
    done(edit("str_replace", path, old_str="one", new_str="two"))
    assert done(edit("view", path)) == "     1\ttwo"
    assert get(path) == b"two\n"
    listed = done(edit("view", "/app/odd")).split("\n")[1:]
    assert listed == [name.replace("\n", "\\n")]
    shell(f"rm -- {shlex.quote(path)}")


def test_what_is_no_text_file_is_told(edit: Edit, put: Any, shell: Shell) -> None:
    put("/app/binary", b"\x7fELF\0\1")
    shell("cd /app && mkfifo pipe && ln -s pipe topipe && ln -s loop loop && mkdir -m 0 locked")
    assert "binary file of 6 bytes" in refused(edit("view", "/app/binary"))
    assert "binary file" in refused(edit("str_replace", "/app/binary", old_str="E", new_str=""))
    for path in ("/app/pipe", "/app/topipe", "/dev/zero", "/dev/null"):
        assert "neither a file nor a folder" in refused(edit("view", path))
        assert "neither a file nor a folder" in refused(
            edit("insert", path, insert_line=0, new_str="x")
        )
        assert "exists already" in refused(edit("create", path, file_text="x"))
    assert refused(edit("view", "/app/loop")) == "/app/loop: Too many levels of symbolic links."
    assert "File name too long" in refused(edit("view", "/app/" + "n" * 256))
    assert "Input/output error" in refused(edit("view", "/proc/self/mem"))
    assert "Linux version" in done(edit("view", "/proc/version"))


def test_missing_paths_come_with_what_is_near(edit: Edit, put: Any) -> None:
    put("/app/near/settings.py", b"")
    put("/app/near/other", b"")
    put("/app/near/inside/y", b"")
    assert refused(edit("view", "/app/near/setting.py")) == (
        "/app/near/setting.py: No such file or directory. Did you mean /app/near/settings.py?"
    )
    assert refused(edit("view", "/app/near/insid/x")) == (
        "/app/near/insid/x: No such file or directory. Did you mean /app/near/inside?"
    )
    assert refused(edit("view", "/zzzzzzzz/x")) == "/zzzzzzzz/x: No such file or directory."
    assert done(edit("view", "/app/near/../near/./other")) == "/app/near/../near/./other is empty."


def test_what_may_not_be_written_stays(edit: Edit, shell: Shell, get: Any) -> None:
    shell(
        "mkdir -p /mnt/ro && mount -t tmpfs tmpfs /mnt/ro && echo old > /mnt/ro/file && "
        "mount -n -t tmpfs -o remount,ro tmpfs /mnt/ro"
    )
    said = refused(edit("str_replace", "/mnt/ro/file", old_str="old", new_str="new"))
    assert said == ("/mnt/ro/file was not changed, it could not be written: Read-only file system")
    assert get("/mnt/ro/file") == b"old\n"
    assert "Read-only file system" in refused(edit("create", "/mnt/ro/new", file_text="x"))
    assert "was not changed" in refused(
        edit("str_replace", "/proc/version", old_str="Linux", new_str="x")
    )
    assert refused(edit("undo", "/mnt/ro/file")).startswith("There is no edit")
    shell("umount /mnt/ro")


@pytest.mark.parametrize(
    "room_kib",
    [
        pytest.param(40, id="no-room-beside"),
        pytest.param(100, id="room-beside-and-none-in-place"),
    ],
)
def test_a_full_disk_loses_nothing(edit: Edit, shell: Shell, get: Any, room_kib: int) -> None:
    shell(f"mkdir -p /mnt/full && mount -t tmpfs -o size={room_kib}k tmpfs /mnt/full")
    shell("seq 1 1000 > /mnt/full/file")
    before = get("/mnt/full/file")
    said = refused(edit("insert", "/mnt/full/file", insert_line=5, new_str="x" * 60_000))
    assert "/mnt/full/file was not changed, it could not be written" in said
    assert get("/mnt/full/file") == before
    assert shell("ls -A /mnt/full") == "file\n"
    assert "could not be created" in refused(
        edit("create", "/mnt/full/new", file_text="x" * 150_000)
    )
    assert shell("ls -A /mnt/full") == "file\n"
    done(edit("insert", "/mnt/full/file", insert_line=0, new_str="fits"))
    assert get("/mnt/full/file") == b"fits\n" + before
    shell("umount /mnt/full")


def test_undo_does_not_lose_what_others_wrote(edit: Edit, put: Any, get: Any, shell: Shell) -> None:
    put("/app/shared", b"one\n")
    done(edit("str_replace", "/app/shared", old_str="one", new_str="two"))
    shell("echo three >> /app/shared")
    assert "was changed by something else" in refused(edit("undo", "/app/shared"))
    assert get("/app/shared") == b"two\nthree\n"
    shell("rm /app/shared")
    assert "No such file" in refused(edit("undo", "/app/shared"))


def test_undo_says_after_a_change_of_machines_why_it_knows_nothing(
    apptainer_runtime: ApptainerRuntime, sandbox: SandboxHandle, put: Any
) -> None:
    put("/app/resumed", b"x")
    access = EpisodeSandbox(apptainer_runtime, sandbox, resumed=True)
    found = EditorTool().call(
        {"command": "undo", "path": "/app/resumed"},
        ToolContext(sandbox=access, timeout_seconds=SECONDS),
    )
    assert refused(found) == (
        "There is no edit of /app/resumed to undo. "
        "Edits made before another machine took over are not known."
    )


def test_edits_work_without_python_and_while_a_program_runs(
    edit: Edit, put: Any, shell: Shell
) -> None:
    shell("mkdir -p /opt/hidden && mv /usr/bin/python3* /opt/hidden/")
    put("/app/tool", b"#!/bin/sh\necho old\n", mode=0o755)
    done(edit("str_replace", "/app/tool", old_str="old", new_str="new"))
    assert shell("/app/tool") == "new\n"
    shell("mv /opt/hidden/python3* /usr/bin/")


LYING_SHELL = b"""#!/bin/bash
if [[ -e /app/lie && "$*" == *"/app/x"* ]]; then printf . >&3; cat /app/lie; exit; fi
exec /bin/dash "$@"
"""


@pytest.mark.parametrize("answer", ["file many\n", "absent", "absent\n\n", "", "\xff\0\n\0"])
def test_a_sandbox_whose_shell_lies_is_no_fault_of_ours(
    edit: Edit, put: Any, shell: Shell, answer: str
) -> None:
    put("/bin/sh.lying", LYING_SHELL, mode=0o755)
    put("/app/lie", answer.encode())
    shell("mv /bin/sh.lying /bin/sh")
    assert "cannot be read" in refused(edit("view", "/app/x"))
    shell("ln -sf dash /bin/sh; rm /app/lie")


def test_a_gone_sandbox_is_a_fault(
    apptainer_runtime: ApptainerRuntime, start_apptainer: Start
) -> None:
    handle = start_apptainer()
    edit = editing(apptainer_runtime, handle)
    apptainer_runtime.stop(handle.name)
    with pytest.raises(SandboxGone):
        edit("view", "/app")
