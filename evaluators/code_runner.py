"""Run a candidate program on many inputs inside a sandbox, one process a test.

This module is put into the sandbox, with those that it imports, and executed by the image's own
python3 (3.6 or newer, with the standard library only). It reads one JSON request from its
standard input and writes one JSON line a test to its standard output. What a right answer would
be it is not told, but for checks that only Python code can express: these it runs itself, and the
candidate answers their calls from a process of its own, which can neither read this one's memory
nor its files.
"""

# ruff: noqa: PTH102, PTH118, PTH123, PTH208, S102, SIM105, UP031

import builtins
import ctypes
import json
import os
import resource
import shutil
import signal
import subprocess
import sys

from evaluators.code_candidate import ERROR_BYTES, RESULT_FD
from evaluators.code_values import pack, unpack

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

READY = "prorl-code ready"
PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS, PR_SET_CHILD_SUBREAPER = 4, 24, 38, 36


def main() -> None:
    """Answer the request."""
    harden()
    request = json.loads(sys.stdin.buffer.read().decode("utf-8"))
    say({"ready": READY})
    for module in request["imports"]:  # before a candidate can put something in their place
        try:
            __import__(module)
        except ImportError:
            pass
    runner = Runner(request)
    if request.get("compile") and not runner.compiles(request["compile"]):
        return
    timeouts = 0
    for number, test in enumerate(request["tests"], request["first"]):
        if timeouts >= request["most_timeouts"]:
            say({"test": number, "status": "not_run"})
            continue
        told = runner.run(test)
        timeouts += told["status"] == "timeout"
        say(dict(told, test=number))


def say(value: "dict[str, Any]") -> None:
    """Write one line."""
    sys.stdout.buffer.write(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))
    sys.stdout.buffer.write(b"\n")
    sys.stdout.buffer.flush()


_LIBRARY = ctypes.CDLL(None)


def prctl(option: int, value: int) -> int:
    """Ask the kernel; a refusal leaves things as they are."""
    return int(_LIBRARY.prctl(option, value, 0, 0, 0))


def harden() -> None:
    """Close this process to others of its account, and become the parent of who is left behind."""
    prctl(PR_SET_DUMPABLE, 0)
    prctl(PR_SET_CHILD_SUBREAPER, 1)


class Runner:
    """Run single tests under the request's limits."""

    def __init__(self, request: "dict[str, Any]") -> None:
        self.request = request
        self.folder = request["folder"]
        self.kind = request["kind"]
        start = (
            "import sys; sys.path[0] = %r; from evaluators.code_candidate import main; main()"
            % self.folder
        )
        self.python = [sys.executable, "-c", start]

    def compiles(self, command: str) -> bool:
        """Run the compiler and tell what became of it."""
        limits = {"cpu": self.request["compile_seconds"], "memory": None, "file": 1 << 30}
        ended = self.execute(["/bin/sh", "-c", command], self.folder, limits, b"")
        status = "ok" if ended["exit"] == 0 else "compile_error"
        say({"compile": status, "exit": ended["exit"], "error": ended["error"]})
        return status == "ok"

    def run(self, test: "dict[str, Any]") -> "dict[str, Any]":
        """Run one test in a folder of its own and return its line."""
        work = os.path.join(self.folder, "work")
        shutil.rmtree(work, ignore_errors=True)
        os.mkdir(work)
        limits = {
            "cpu": self.request["seconds"],
            "memory": self.request["memory"],
            "file": max(test["most"] + 1, 1 << 20),
        }
        source = os.path.join(self.folder, self.request["file"])
        try:
            if self.kind == "stdin":
                return self.print_of(test, work, limits, source)
            if self.kind == "call":
                return self.value_of(test, work, limits, source)
            return self.check(test, work, limits, source)
        finally:
            end_children()

    def print_of(
        self, test: "dict[str, Any]", work: str, limits: "dict[str, Any]", source: str
    ) -> "dict[str, Any]":
        argv = self.request["argv"] or [*self.python, "main", source]
        ended = self.execute(argv, work, limits, test["stdin"].encode("utf-8"))
        output = ended.pop("output")
        if len(output) > test["most"]:
            return dict(ended, status="output")
        return dict(ended, output=output.decode("utf-8", "replace"))

    def value_of(
        self, test: "dict[str, Any]", work: str, limits: "dict[str, Any]", source: str
    ) -> "dict[str, Any]":
        argv = [*self.python, "call", source]
        call = json.dumps({"name": self.request["name"], "args": test["args"]}).encode() + b"\n"
        path = os.path.join(self.folder, "value")
        with open(path, "wb") as sink:
            ended = self.execute(argv, work, limits, call, result=sink.fileno())
        ended.pop("output")
        with open(path, "rb") as told:
            line = told.read(test["most"] + 1)
        return dict(ended, **read_value(line, ended["status"], test["most"]))

    def check(
        self, test: "dict[str, Any]", work: str, limits: "dict[str, Any]", source: str
    ) -> "dict[str, Any]":
        """Run a check here, with a function that has the candidate's process answer."""
        ask, asked = os.pipe()
        answers, answer = os.pipe()
        begun = Child([*self.python, "call", source], work, limits, ask, answer, self.folder)
        os.close(ask)
        os.close(answer)
        proxy = Proxy(self.request["name"], asked, answers, test["most"])
        status, error = "ok", ""
        scope = {"__name__": "check", "candidate": proxy, self.request["name"]: proxy}
        begun.limit_wall(wall_of(limits["cpu"]))
        try:
            exec(compile(test["source"], "check", "exec"), scope)
        except AssertionError as wrong:
            status, error = "wrong", str(wrong)[:ERROR_BYTES]
        except BaseException as fault:
            status, error = "error", "%s: %s" % (type(fault).__name__, str(fault)[:ERROR_BYTES])
        os.close(asked)
        os.close(answers)
        ended = begun.wait()
        ended.pop("output")
        if ended["status"] in ("timeout", "memory"):
            status = ended["status"]
        return dict(ended, status=status, error=error or ended["error"])

    def execute(
        self,
        argv: "list[str]",
        work: str,
        limits: "dict[str, Any]",
        data: bytes,
        result: "int | None" = None,
    ) -> "dict[str, Any]":
        """Run a program to its end and return its status, output and last words."""
        given = os.path.join(self.folder, "stdin")
        with open(given, "wb") as file:
            file.write(data)
        with open(given, "rb") as file:
            child = Child(argv, work, limits, file.fileno(), result, self.folder)
        child.limit_wall(wall_of(limits["cpu"]))
        return child.wait()


def wall_of(seconds: float) -> float:
    """Return how long a process with so much processor time may take on a busy machine."""
    return 3.0 * seconds + 5.0


class Child:
    """A process of the candidate's, whose output goes to files of bounded size."""

    def __init__(
        self,
        argv: "list[str]",
        work: str,
        limits: "dict[str, Any]",
        stdin: int,
        result: "int | None",
        folder: str,
    ) -> None:
        self.out, self.err = os.path.join(folder, "stdout"), os.path.join(folder, "stderr")
        self.late = False
        self.most = limits["file"]
        env = {
            "PATH": os.environ.get("PATH", "/usr/local/bin:/usr/bin:/bin"),
            "HOME": work,
            "LANG": "C.UTF-8",
            "PYTHONHASHSEED": "0",
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",  # each thread would reserve address space
        }

        def confine() -> None:
            bound(resource.RLIMIT_CPU, int(limits["cpu"] + 0.999))
            bound(resource.RLIMIT_FSIZE, limits["file"])
            bound(resource.RLIMIT_CORE, 0)
            if limits["memory"]:
                bound(resource.RLIMIT_AS, limits["memory"])
            for capability in range(64):
                if prctl(PR_CAPBSET_DROP, capability) != 0:
                    break
            prctl(PR_SET_NO_NEW_PRIVS, 1)

        if result is not None:
            os.dup2(result, RESULT_FD, False)
        with open(self.out, "wb") as out, open(self.err, "wb") as err:
            try:
                self.process = subprocess.Popen(
                    argv,
                    stdin=stdin,
                    stdout=out,
                    stderr=err,
                    cwd=work,
                    env=env,
                    start_new_session=True,
                    preexec_fn=confine,
                    pass_fds=() if result is None else (RESULT_FD,),
                )
                self.fault = ""
            except (OSError, subprocess.SubprocessError) as fault:
                self.fault = str(fault)
        if result is not None:
            os.close(RESULT_FD)

    def limit_wall(self, seconds: float) -> None:
        """Kill the process at the end of that time, whatever this one waits for."""

        def late(*_: object) -> None:
            self.late = True
            self.kill()

        signal.signal(signal.SIGALRM, late)
        signal.setitimer(signal.ITIMER_REAL, seconds)

    def kill(self) -> None:
        """Kill the process with its group; it is unreaped until `wait`, so the number is its."""
        if not self.fault:
            try:
                os.killpg(self.process.pid, signal.SIGKILL)
            except OSError:
                pass

    def wait(self) -> "dict[str, Any]":
        """Return how it ended."""
        if self.fault:
            signal.setitimer(signal.ITIMER_REAL, 0)
            told = {"status": "error", "exit": None, "error": self.fault, "seconds": 0.0}
            return dict(told, output=b"")
        _, state, usage = os.wait4(self.process.pid, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        self.process.returncode = 0
        code = -os.WTERMSIG(state) if os.WIFSIGNALED(state) else os.WEXITSTATUS(state)
        status = "ok" if code == 0 else "error"
        if self.late or code == -signal.SIGXCPU:
            status = "timeout"
        with open(self.out, "rb") as out:
            output = out.read(self.most)
        with open(self.err, "rb") as err:
            err.seek(max(0, os.fstat(err.fileno()).st_size - ERROR_BYTES))
            error = err.read(ERROR_BYTES).decode("utf-8", "replace")
        if status == "error" and "MemoryError" in error:
            status = "memory"
        seconds = usage.ru_utime + usage.ru_stime
        told = {"status": status, "exit": code, "error": error, "seconds": round(seconds, 3)}
        return dict(told, output=output)


def bound(what: int, value: int) -> None:
    """Set a limit; one that is lower already stays."""
    hard = resource.getrlimit(what)[1]
    most = value if hard == resource.RLIM_INFINITY else min(value, hard)
    extra = 1 if what == resource.RLIMIT_CPU else 0  # the kill comes a second after the signal
    top = most + extra if hard == resource.RLIM_INFINITY else min(most + extra, hard)
    resource.setrlimit(what, (most, top))


def end_children() -> None:
    """Kill what a test left behind: as their reaper this process is the parent of the orphans."""
    while True:
        killed = False
        for name in os.listdir("/proc"):
            if name.isdigit() and parent_of(name) == os.getpid():
                try:
                    os.kill(int(name), signal.SIGKILL)
                except OSError:
                    pass
                killed = True
        if not killed:
            return
        try:
            os.waitpid(-1, 0)
        except OSError:
            return


def parent_of(pid: str) -> int:
    """Return the parent's number from field 4 of the process's stat."""
    try:
        with open("/proc/%s/stat" % pid, "rb") as file:
            return int(file.read().rsplit(b")", 1)[1].split()[1])
    except (OSError, IndexError, ValueError):
        return 0


class Proxy:
    """Stand for the candidate's function where a check calls it."""

    def __init__(self, name: str, asked: int, answers: int, most: int) -> None:
        self.name, self.asked, self.most = name, asked, most
        self.answers = os.fdopen(os.dup(answers), "rb")

    def __call__(self, *args: "Any", **kwargs: "Any") -> "Any":
        """Return what the candidate returns, or raise what it raises, if Python has it."""
        call = {"name": self.name, "args": pack(list(args)), "kwargs": pack(kwargs)}
        data = json.dumps(call).encode() + b"\n"
        while data:
            data = data[os.write(self.asked, data) :]
        line = self.answers.readline(self.most + 1)
        told = read_value(line, "ok", self.most)
        if told["status"] != "ok":
            kind = getattr(builtins, str(told.get("raised", "")), RuntimeError)
            if not (isinstance(kind, type) and issubclass(kind, Exception)):
                kind = RuntimeError
            if issubclass(kind, AssertionError):
                kind = RuntimeError
            raise kind(told.get("error", "the candidate gave no answer"))
        return unpack(told["value"])


def read_value(line: bytes, status: str, most: int) -> "dict[str, Any]":
    """Return what the candidate's process wrote of its call; it may have written anything."""
    if status != "ok":
        return {"status": status}
    if len(line) > most:
        return {"status": "output"}
    try:
        told = json.loads(line.split(b"\n", 1)[0].decode("utf-8"))
        if "value" in told:
            return {"status": "ok", "value": told["value"]}
        return {"status": "error", "raised": told["raised"], "error": str(told["error"])}
    except (ValueError, KeyError, TypeError, RecursionError):
        return {"status": "error", "error": "the function's process ended without an answer"}
