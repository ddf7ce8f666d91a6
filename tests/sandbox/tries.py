"""Programs that a hostile sandbox runs, and how each of their tries ended."""

import json

from sandboxes.runtime.apptainer import ApptainerRuntime
from sandboxes.runtime.layout import Layout, read_record
from sandboxes.runtime.protocol import SandboxHandle

# Runs one try after the other; prints how each ended: "done", or the name of the error.
TRIES = """
import ctypes, errno, json, os, sys
libc, tries = ctypes.CDLL(None, use_errno=True), {}
def checked(result):
    if result == -1:
        raise OSError(ctypes.get_errno(), "")
def call(number, *words):
    return lambda: checked(libc.syscall(number, *words))
def mount(kind, source=b"none", options=None, flags=0):
    os.makedirs("/mnt/try", exist_ok=True)
    return lambda: checked(libc.mount(source, b"/mnt/try", kind, flags, options))
def write(path, text=b"x"):
    def attempt():
        descriptor = os.open(path, os.O_WRONLY)
        try:
            os.write(descriptor, text)
        finally:
            os.close(descriptor)
    return attempt
def run():
    ended = {}
    for name, attempt in tries.items():
        try:
            attempt()
            ended[name] = "done"
        except OSError as fault:
            ended[name] = errno.errorcode[fault.errno]
    print(json.dumps(ended))
"""


def python(runtime: ApptainerRuntime, handle: SandboxHandle, program: str, *words: str) -> str:
    """Run a program in the sandbox; returns what it printed."""
    result = runtime.exec(handle, ["python3", "-c", program, *words], timeout_seconds=60)
    assert result.exit_code == 0, result.stderr
    return result.stdout.decode()


def tried(runtime: ApptainerRuntime, handle: SandboxHandle, program: str) -> dict[str, str]:
    """Run the tries that `program` adds; returns how each one ended, by name."""
    ended: dict[str, str] = json.loads(python(runtime, handle, f"{TRIES}{program}\nrun()"))
    return ended


def record_of(runtime: ApptainerRuntime, handle: SandboxHandle) -> dict[str, int]:
    """Return what the keeper wrote about a sandbox."""
    record = read_record(Layout(runtime.root).instance(handle.name) / "record.json")
    assert record is not None
    return record
