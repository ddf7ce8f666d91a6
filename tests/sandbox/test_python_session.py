"""Persistent interpreters in real sandboxes: plain Python and IPython, kind and hostile cells."""

from __future__ import annotations

import ast
import io
import re
import struct
import subprocess
import sys
import tarfile
import time
import tracemalloc
import zlib
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from rollouts.tools.base import ToolContext, ToolUnavailable
from rollouts.tools.ipython import FRESH, NO_IPYTHON, RESTARTED, IPythonTool
from rollouts.tools.sandbox import EpisodeSandbox
from sandboxes.runtime import interpreter, python_cells, python_kernel
from sandboxes.runtime.apptainer import ApptainerRuntime
from sandboxes.runtime.exceptions import PythonFailed, SandboxGone
from sandboxes.runtime.protocol import Runtime, SandboxHandle
from sandboxes.runtime.sessions import PythonResult, PythonSession
from tests.sandbox.conftest import Start, lacking, starter

IPYTHON = "ipython==9.10.1"
MATPLOTLIB = "matplotlib==3.11.2"
FOLDER = "/opt/packages"
UNUSED = {"bin", "jedi", "parso", "share", "tests"}  # thousands of files
SECONDS = 60.0
MAX_CLIENT_BYTES = 8 * 1024 * 1024

sandboxed = pytest.mark.sandbox


def png(width: int, height: int) -> bytes:
    """Return a valid grey PNG."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    rows = zlib.compress((b"\0" + b"\x80" * width) * height)
    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def packaged(pytestconfig: pytest.Config, requirement: str) -> bytes:
    """Return a package and what it needs as a tar archive; pip's download is kept between runs."""
    kept: Path = pytestconfig.cache.mkdir(requirement.replace("==", "-"))
    if not any(kept.glob("*.dist-info")):
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(kept)]
        done = subprocess.run([*command, requirement], capture_output=True, text=True)
        if done.returncode != 0:
            lacking(f"pip did not install {requirement}: {done.stderr[-500:]}")
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.add(
            kept,
            arcname=FOLDER.lstrip("/"),
            filter=lambda member: None if Path(member.name).name in UNUSED else member,
        )
    return buffer.getvalue()


def unpack(runtime: Runtime, handle: SandboxHandle, archive: bytes) -> None:
    """Put packages into a sandbox, off Python's own path."""
    unpacked = runtime.exec(
        handle,
        ["tar", "-x", "-f", "-", "-C", "/", "--no-same-owner"],
        stdin=archive,
        timeout_seconds=SECONDS,
    )
    assert unpacked.exit_code == 0


def await_deletion(runtime: ApptainerRuntime) -> None:
    """Wait until stopped sandboxes are deleted: the runtime's fixture would meet that."""
    while any((runtime.root / "trash").iterdir()):
        time.sleep(0.05)


@pytest.fixture(scope="module")
def sandbox(
    apptainer_runtime: ApptainerRuntime, base_image: Path, pytestconfig: pytest.Config
) -> Iterator[SandboxHandle]:
    """Start one sandbox for the module; IPython is in it, off Python's own path."""
    made: list[str] = []
    handle = starter(apptainer_runtime, str(base_image), made)()
    unpack(apptainer_runtime, handle, packaged(pytestconfig, IPYTHON))
    yield handle
    for name in made:
        apptainer_runtime.stop(name)
    await_deletion(apptainer_runtime)


def environment(kind: str) -> dict[str, str]:
    """Return what makes IPython found, or not."""
    return {"PYTHONPATH": FOLDER} if kind == "ipython" else {}


@pytest.fixture(
    scope="module", params=[pytest.param(k, marks=sandboxed) for k in ("python", "ipython")]
)
def session(
    request: pytest.FixtureRequest, apptainer_runtime: ApptainerRuntime, sandbox: SandboxHandle
) -> Iterator[PythonSession]:
    """Return an interpreter of each kind; tests that break it get a fresh one after them."""
    opened = apptainer_runtime.open_python(sandbox, env=environment(request.param))
    assert opened.kind == request.param
    with closing(opened):
        yield opened


@pytest.fixture(scope="module")
def plain(apptainer_runtime: ApptainerRuntime, sandbox: SandboxHandle) -> Iterator[PythonSession]:
    """Return a plain Python, which starts anew in less time, for tests that end it."""
    with closing(apptainer_runtime.open_python(sandbox)) as opened:
        yield opened


@pytest.fixture(scope="module")
def ipython(apptainer_runtime: ApptainerRuntime, sandbox: SandboxHandle) -> Iterator[PythonSession]:
    """Return an IPython of its own, for what only that can do."""
    with closing(apptainer_runtime.open_python(sandbox, env=environment("ipython"))) as opened:
        yield opened


def run(session: PythonSession, code: str, **options: Any) -> PythonResult:
    """Run a cell that is expected to end by itself."""
    found = session.run(code, **{"timeout_seconds": SECONDS, **options})
    assert not found.timed_out
    return found


def works(session: PythonSession) -> None:
    """Check that the next cell is answered as if nothing had been."""
    after = run(session, "print('text')\n6 * 7")
    assert (after.output, after.error, after.restarted) == ("text\n42\n", "", False)


def test_names_survive_and_values_are_shown(session: PythonSession) -> None:
    assert run(session, "import math\nx = 20").output == ""
    assert run(session, "def twice(n):\n    return 2 * n").output == ""
    assert run(session, "x += 1\ntwice(x)").output == "42\n"
    assert run(session, "_").output == "42\n"
    assert run(session, "'a' 'b'").output == "'ab'\n"
    assert run(session, "None").output == ""
    assert run(session, "__name__").output == "'__main__'\n"
    assert run(session, "").output == ""


def test_all_output_comes_in_its_order(session: PythonSession) -> None:
    cell = (
        "import os, subprocess, sys\n"
        "print('1', end=' ')\n"
        "print('2', file=sys.stderr)\n"
        "_ = os.system('echo 3; echo 4 >&2')\n"
        "_ = sys.stdout.buffer.write(b'5 ')\n"
        "_ = os.write(1, b'6\\n')\n"
        "_ = subprocess.run(['echo', '7'])\n"
        "'8'"
    )
    assert run(session, cell).output == "1 2\n3\n4\n5 6\n7\n'8'\n"


def test_errors_have_their_traceback_and_none_of_our_frames(session: PythonSession) -> None:
    run(session, "def broken(n):\n    return 1 / n")
    found = run(session, "print('before')\nbroken(0)")
    assert found.output == "before\n"
    assert "return 1 / n" in found.error
    assert found.error.rstrip().endswith("ZeroDivisionError: division by zero")
    assert python_cells.SOURCE_NAME not in found.error
    assert "\x1b" not in found.error
    chained = run(
        session, "try:\n    broken(0)\nexcept Exception as e:\n    raise KeyError(1) from e"
    )
    assert "direct cause" in chained.error
    assert chained.error.rstrip().endswith("KeyError: 1")
    works(session)


@pytest.mark.parametrize(
    ("cell", "last"),
    [
        ("1 +", "SyntaxError: invalid syntax"),
        ("x = 'a\0b'", "ValueError: source code string cannot contain null bytes"),
        ("x = '\ud800'", "surrogates not allowed"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("import sys; sys.exit('bye')", "SystemExit: bye"),
        ("exit()", "SystemExit"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("raise BaseException('x')", "BaseException: x"),
        ("def f(): f()\nf()", "RecursionError: maximum recursion depth exceeded"),
        ("input('name? ')", "put the value in the code"),
        ("import sys; sys.stdin.read()", "put the value in the code"),
        ("class Mute(Exception):\n    def __str__(self): raise ValueError\nraise Mute", "Mute"),
    ],
)
def test_what_fails_is_told_and_the_interpreter_goes_on(
    session: PythonSession, cell: str, last: str
) -> None:
    run(session, "kept = 1")
    found = run(session, cell)
    assert last in found.error
    assert python_cells.SOURCE_NAME not in found.error
    assert not found.restarted
    assert run(session, "kept").output == "1\n"
    works(session)


def test_await_stands_outside_of_functions(session: PythonSession) -> None:
    run(session, "import asyncio\nasync def later(): await asyncio.sleep(0); return 'done'")
    assert run(session, "await later()").output == "'done'\n"
    assert run(session, "y = await later()\nprint(y)").output == "done\n"


def test_future_imports_hold_for_later_cells(session: PythonSession) -> None:
    run(session, "from __future__ import annotations")
    assert run(session, "def f(x: nosuch): pass\nf.__annotations__").output == "{'x': 'nosuch'}\n"


def test_definitions_can_be_pickled_and_shared_with_processes(session: PythonSession) -> None:
    cell = (
        "import multiprocessing, pickle\n"
        "class Point:\n    x = 1\n"
        "def square(n):\n    return n * n\n"
        "print(pickle.loads(pickle.dumps(Point())).x)\n"
        "with multiprocessing.Pool(2) as pool:\n    print(pool.map(square, range(4)))"
    )
    assert run(session, cell).output == "1\n[0, 1, 4, 9]\n"


@pytest.mark.parametrize(
    "cell",
    [
        "import time; time.sleep(600)",
        "while True: pass",
        "import os; os.system('sleep 600')",
        "import subprocess; subprocess.run(['sleep', '600'])",
        "import threading; threading.Event().wait()",
        "import asyncio; await asyncio.sleep(600)",
        "while True: print('x' * 1000)",
    ],
)
def test_a_late_cell_is_interrupted_and_names_survive(session: PythonSession, cell: str) -> None:
    run(session, "kept = 1")
    found = session.run(cell, timeout_seconds=0.2, output_bytes=1000)
    assert (found.timed_out, found.cancelled, found.restarted) == (True, False, False)
    assert run(session, "kept").output == "1\n"
    works(session)


def test_a_cancelled_cell_is_interrupted(session: PythonSession) -> None:
    polls = iter([False, True])
    found = session.run(
        "import time; time.sleep(600)",
        timeout_seconds=SECONDS,
        cancelled=lambda: next(polls, True),
    )
    assert (found.timed_out, found.cancelled, found.restarted) == (False, True, False)
    assert "KeyboardInterrupt" in found.error + found.output
    works(session)


def test_a_stale_interrupt_meets_no_later_cell(session: PythonSession) -> None:
    """The interrupt of a cell that ends by itself at the same time is dropped."""
    for _ in range(30):
        session.run("pass", timeout_seconds=0.0005)
        found = run(session, "sum(range(20000))")
        assert (found.output, found.error) == ("199990000\n", "")


@sandboxed
@pytest.mark.parametrize(
    ("cell", "how"),
    [
        ("import os; os._exit(3)", "ended with exit code 3"),
        ("import os; os.kill(os.getpid(), 9)", "was ended by SIGKILL"),
        ("import ctypes; ctypes.string_at(0)", "was ended by SIGSEGV"),
        ("import os\nos.closerange(0, 65536)", "The interpreter "),
        (
            "import threading, os\nthreading.Thread(target=os._exit, args=(4,)).start()\n"
            "import time; time.sleep(600)",
            "ended with exit code 4",
        ),
    ],
)
def test_an_ended_interpreter_is_replaced_and_said_to_be(
    plain: PythonSession, cell: str, how: str
) -> None:
    run(plain, "kept = 1")
    found = run(plain, f"print('said', flush=True)\n{cell}")
    assert found.output == "said\n"
    assert how in found.error
    assert found.restarted
    assert "NameError" in run(plain, "kept").error
    works(plain)


@sandboxed
def test_an_interpreter_that_ends_between_cells_is_replaced(
    plain: PythonSession, apptainer_runtime: ApptainerRuntime, sandbox: SandboxHandle
) -> None:
    pid = run(plain, "import os; os.getpid()").output.strip()
    killed = apptainer_runtime.exec(
        sandbox,
        ["/bin/sh", "-c", 'kill -9 "$1"; while kill -0 "$1"; do sleep 0.01; done', "sh", pid],
        timeout_seconds=SECONDS,
    )
    assert killed.exit_code == 0
    found = run(plain, "1 + 1")
    # Its end may come to us only now: then the cell was not run, and is said to have met it.
    assert found.restarted
    assert found.output == "2\n" or "was ended by SIGKILL" in found.error
    works(plain)


@sandboxed
def test_code_that_catches_interrupts_is_killed(plain: PythonSession) -> None:
    loop = (
        "while True:\n    try:\n        time.sleep(0.01)\n    except BaseException:\n        pass"
    )
    found = plain.run(f"import time\n{loop}", timeout_seconds=0.1)
    assert (found.timed_out, found.restarted, found.error) == (True, True, "")
    works(plain)


@pytest.mark.parametrize(
    "cell",
    [
        "import os\nos.closerange(0, 256)",
        "import os\nfor n in (0, 1, 2): os.close(n)",
        "import os, sys\nos.dup2(os.open('/dev/null', os.O_WRONLY), 1)\nos.dup2(1, 2)",
        "import sys, io\nsys.stdout = sys.stderr = io.StringIO(); print('lost')",
        "import sys\nsys.stdout = sys.stderr = sys.stdin = None",
        "import sys\nsys.stdout.close(); sys.stderr.close(); sys.stdin.close()",
        "import json, os, struct, sys, signal, traceback\n"
        "saved = (os.write, os.read, os.dup2, os.getpid, signal.signal)\n"
        "json.dumps = struct.pack = os.write = os.read = os.dup2 = os.getpid = None\n"
        "signal.signal = None",
        "os.write, os.read, os.dup2, os.getpid, signal.signal = saved",
        "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)",
        "import os\nif os.fork() == 0:\n    raise SystemExit\nos.wait()\nNone",
        "import builtins; builtins.print('\\x1b[31m\\x00\\x07')",
        "import os; os.write(1, bytes(range(256)) * 40)\nNone",
        "import os, sys; os.chdir('/'); sys.path.clear(); sys.modules.pop('io')",
    ],
)
def test_games_with_descriptors_and_modules_do_no_harm(session: PythonSession, cell: str) -> None:
    found = run(session, cell)
    assert not found.restarted
    works(session)
    run(session, "import os; os.chdir('/app')")
    late = session.run("import time; time.sleep(600)", timeout_seconds=0.1)
    assert (late.timed_out, late.restarted) == (True, False)


@sandboxed
def test_frames_that_a_cell_writes_itself_end_the_interpreter_at_most(
    plain: PythonSession,
) -> None:
    """A cell may find the descriptor of the replies: it fools nobody but itself."""
    run(plain, "import os\nhighest = max(int(n) for n in os.listdir('/proc/self/fd'))")
    for frame in ("b'D' + (8).to_bytes(4, 'big') + bytes(8)", "b'I' + b'\\xff' * 4", "b'?' * 9"):
        for number in range(4):
            run(plain, "import os\nhighest = max(map(int, os.listdir('/proc/self/fd')))")
            plain.run(
                f"try:\n    os.write(highest - {number}, {frame})\nexcept OSError:\n    pass",
                timeout_seconds=0.3,
            )
            run(plain, "pass")
            works(plain)


def test_a_fork_ends_where_its_cell_ends(session: PythonSession) -> None:
    cell = (
        "import os\npid = os.fork()\n"
        "if pid == 0:\n    print('child')\n"
        "else:\n    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))"
    )
    assert run(session, cell).output == "child\n0\n"
    works(session)


def test_threads_print_into_the_next_observation(session: PythonSession) -> None:
    cell = (
        "import threading\ngo, gone = threading.Event(), threading.Event()\n"
        "def late():\n    go.wait(); print('late'); gone.set()\n"
        "threading.Thread(target=late).start()"
    )
    assert run(session, cell).output == ""
    assert run(session, "go.set(); ok = gone.wait(60)\nprint('next')").output == "late\nnext\n"


def test_output_is_bounded_on_both_sides(session: PythonSession) -> None:
    cell = "for _ in range(1000): print('x' * 99_999)\nprint('end')"
    peak = "import resource; resource.getrusage(resource.RUSAGE_SELF).ru_maxrss"
    before = int(run(session, peak).output)
    tracemalloc.start()
    found = run(session, cell, output_bytes=1000)
    _, used = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found.truncated
    head, gap, tail = (
        found.output.split("\n[... ")[0],
        *found.output.split(" bytes left out ...]\n"),
    )
    assert head == "x" * 500
    assert gap.endswith("[... 99999004")
    assert tail == "x" * 495 + "\nend\n"
    assert used < MAX_CLIENT_BYTES
    assert int(run(session, peak).output) - before < 8 * 1024  # KiB


def test_a_long_traceback_is_bounded(session: PythonSession) -> None:
    found = run(session, "raise ValueError('x' * 10_000_000)")
    assert len(found.error) < 2 * python_kernel.MOST_ERROR_CHARACTERS
    works(session)


def test_large_cells_are_taken_and_too_large_ones_refused(session: PythonSession) -> None:
    text = "é" * 500_000
    assert run(session, f"text = '{text}'\nlen(text)").output == "500000\n"
    refused = run(session, "#" * (4 * 1024 * 1024 + 1))
    assert (refused.output, refused.restarted) == ("", False)
    assert refused.error == "The code is longer than 4194304 bytes and was not run.\n"
    works(session)


def test_images_come_with_the_text(session: PythonSession) -> None:
    picture = png(3, 2)
    run(
        session,
        f"class Picture:\n    def _repr_png_(self): return {picture!r}\n"
        "    def __repr__(self): return 'a picture'",
    )
    found = run(session, "print('look')\nPicture()")
    assert (found.output, found.images) == ("look\na picture\n", (("image/png", picture),))


def test_images_are_bounded_and_have_to_be_images(session: PythonSession) -> None:
    run(
        session,
        "class Picture:\n    def __init__(self, data): self.data = data\n"
        "    def _repr_png_(self): return self.data",
    )
    large = run(session, "Picture(b'\\x89PNG\\r\\n\\x1a\\n' + bytes(5_000_000))")
    assert large.images == ()
    assert large.output.endswith("[image left out: 5000008 bytes are too many]\n")
    assert run(session, "Picture(b'<svg onload=x>')").images == ()


@sandboxed
@pytest.mark.slow
def test_figures_are_shown_as_images(
    apptainer_runtime: ApptainerRuntime, start_apptainer: Start, pytestconfig: pytest.Config
) -> None:
    handle = start_apptainer()
    unpack(apptainer_runtime, handle, packaged(pytestconfig, MATPLOTLIB))
    with closing(apptainer_runtime.open_python(handle, env={"PYTHONPATH": FOLDER})) as session:
        shown = run(session, "from matplotlib import pyplot as plt\nplt.plot([1, 2])\nplt.show()")
        left_open = run(session, "figure, axes = plt.subplots()")
        as_value = run(session, "figure")
        broken = run(session, "plt.title('$\\\\frac{$')\nNone")
        after = run(session, "plt.get_fignums()")
    for found in (shown, left_open, as_value):
        assert [mime for mime, _ in found.images] == ["image/png"]
    assert as_value.output == "<Figure size 640x480 with 1 Axes>\n"
    assert (broken.images, "ValueError" in broken.error) == ((), True)
    assert (after.output, after.images) == ("[]\n", ())
    apptainer_runtime.stop(handle.name)
    await_deletion(apptainer_runtime)


@sandboxed
def test_closing_ends_what_the_cells_began(
    apptainer_runtime: ApptainerRuntime, sandbox: SandboxHandle
) -> None:
    session = apptainer_runtime.open_python(sandbox)
    started = run(session, "import subprocess; subprocess.Popen(['sleep', '600']).pid")
    session.close()
    session.close()
    gone = apptainer_runtime.exec(
        sandbox,
        ["/bin/sh", "-c", 'while kill -0 "$1"; do sleep 0.01; done', "sh", started.output.strip()],
        timeout_seconds=SECONDS,
    )
    assert gone.exit_code == 0


@sandboxed
def test_ipython_has_magics_and_commands(ipython: PythonSession) -> None:
    assert run(ipython, "!echo hi; echo err >&2").output == "hi\nerr\n"
    assert run(ipython, "lines = !printf 'a\\nb\\n'\nlines").output == "['a', 'b']\n"
    assert run(ipython, "%%bash\necho in bash").output == "in bash\n"
    assert run(ipython, "%cd -q /tmp\n%pwd").output == "'/tmp'\n"
    assert "No module named pip" in run(ipython, "%pip --version").output
    assert run(ipython, "%nosuch").output.startswith("UsageError")
    assert run(ipython, "from IPython.display import display\ndisplay(1, 'b')\n2;").output == (
        "1\n'b'\n"
    )
    assert run(ipython, "get_ipython().history_manager.enabled").output == "False\n"
    works(ipython)


@sandboxed
def test_an_ended_ipython_is_replaced(ipython: PythonSession) -> None:
    found = run(ipython, "import os; os._exit(3)")
    assert (found.error, found.restarted) == ("The interpreter ended with exit code 3.\n", True)
    assert ipython.kind == "ipython"
    works(ipython)


@sandboxed
def test_commands_of_ipython_work_where_there_is_no_bash(
    apptainer_runtime: ApptainerRuntime, sandbox: SandboxHandle
) -> None:
    env = environment("ipython") | {"SHELL": "/bin/nosuch"}
    with closing(apptainer_runtime.open_python(sandbox, env=env)) as session:
        assert run(session, "!echo works").output == "works\n"


@sandboxed
def test_an_interrupted_command_of_ipython_ends(ipython: PythonSession) -> None:
    found = ipython.run("!sleep 600", timeout_seconds=0.2)
    assert (found.timed_out, found.restarted) == (True, False)
    works(ipython)


@sandboxed
def test_files_of_the_agent_do_not_stand_in_for_the_kernels_modules(
    apptainer_runtime: ApptainerRuntime, sandbox: SandboxHandle
) -> None:
    for name in ("ast", "traceback", "IPython", "fcntl", "traitlets"):
        apptainer_runtime.write_file(sandbox, f"/trap/{name}.py", b"raise SystemExit('mine')")
    apptainer_runtime.write_file(sandbox, "/trap/own.py", b"answer = 42")
    opened = apptainer_runtime.open_python(sandbox, env=environment("ipython"), cwd="/trap")
    with closing(opened) as session:
        assert session.kind == "ipython"
        assert run(session, "import own\nown.answer").output == "42\n"


@sandboxed
def test_an_image_without_python_is_the_operators_to_mend(
    apptainer_runtime: ApptainerRuntime, start_apptainer: Start
) -> None:
    handle = start_apptainer()
    removed = apptainer_runtime.exec(
        handle, ["/bin/sh", "-c", "rm /usr/bin/python3*"], timeout_seconds=SECONDS
    )
    assert removed.exit_code == 0
    with pytest.raises(PythonFailed, match="the image has no python3"):
        apptainer_runtime.open_python(handle)
    access = EpisodeSandbox(apptainer_runtime, handle)
    with pytest.raises(ToolUnavailable, match="the image has no python3"):
        IPythonTool().call({"code": "1"}, ToolContext(sandbox=access, timeout_seconds=SECONDS))


@sandboxed
def test_a_python_that_does_not_start_is_reported_with_its_words(
    apptainer_runtime: ApptainerRuntime, start_apptainer: Start
) -> None:
    handle = start_apptainer()
    script = b"#!/bin/sh\necho broken library >&2\nexit 9\n"
    apptainer_runtime.write_file(handle, "/usr/local/bin/python3", script, mode=0o755)
    with pytest.raises(PythonFailed, match="ended at its start: broken library"):
        apptainer_runtime.open_python(handle)


def test_every_runtime_opens_interpreters_and_misses_sandboxes(
    runtime: Runtime, start: Start
) -> None:
    handle = start()
    session = runtime.open_python(handle, env={"MINE": "yes"}, cwd="/app")
    with closing(session):
        cell = "import os\nos.environ['MINE'], os.path.realpath('.') == os.path.realpath('/app')"
        assert run(session, cell).output == "('yes', True)\n"
        runtime.stop(handle.name)
        with pytest.raises(SandboxGone):
            session.run("1", timeout_seconds=SECONDS)
    with pytest.raises(SandboxGone):
        runtime.open_python(handle)


@sandboxed
def test_the_tool_opens_the_interpreter_late_and_says_what_it_lacks(
    apptainer_runtime: ApptainerRuntime, sandbox: SandboxHandle
) -> None:
    access = EpisodeSandbox(apptainer_runtime, sandbox, resumed=True)
    with closing(access):
        context = ToolContext(sandbox=access, timeout_seconds=SECONDS)
        tool = IPythonTool()
        first = tool.call({"code": "x = 1\nx"}, context)
        assert first.content == f"{FRESH}\n{NO_IPYTHON}\n1"
        ended = tool.call({"code": "import os; os._exit(0)"}, context)
        assert ended.content == f"The interpreter ended with exit code 0.\n{RESTARTED}"
        late = tool.call({"code": "import time; time.sleep(60)", "timeout_seconds": 0.1}, context)
        assert re.search(r"KeyboardInterrupt\n\[timed out: .* after 0.1 seconds", late.content)
        assert late.data["failed"] is True


@pytest.mark.parametrize("module", [python_cells, python_kernel])
def test_the_kernel_is_written_in_the_syntax_of_python_3_6(module: Any) -> None:
    text = Path(module.__file__).read_text(encoding="utf-8")
    assert "\0" not in text
    ast.parse(text, feature_version=(3, 6))


def test_frames_have_room_for_the_largest_image() -> None:
    assert python_kernel.MOST_IMAGE_BYTES + 64 < interpreter.MAX_FRAME_BYTES
