"""The editor's way to files in a sandbox: a few programs that even busybox has, no Python."""

from __future__ import annotations

import difflib
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from rollouts.tools.editing import EditRefused

if TYPE_CHECKING:
    from rollouts.tools.base import SandboxAccess
    from sandboxes.runtime.protocol import ExecResult

CALL_SECONDS = 60.0
MISSING = "No such file or directory"
_MESSAGE_BYTES = 64 * 1024

# $1 is the path, $2 the most bytes. The kind comes first, then its details. A named pipe would
# block and a device never end: nothing but a regular file is opened.
_LOOK = """
if [ -d "$1" ]; then
  echo folder
elif [ -f "$1" ]; then
  size=$(stat -L -c %s "$1" 2>/dev/null || wc -c < "$1") || exit 1
  echo "file $size"
  [ "$size" -gt "$2" ] || exec head -c "$(($2 + 1))" "$1"
  [ -r "$1" ]
elif [ -e "$1" ]; then
  echo special
else
  echo absent
  LC_ALL=C ls -Ld "$1" 2>&1
  folder=$1
  while [ ! -d "$folder/" ]; do folder=${folder%/*}; done
  printf '\\0%s\\0' "$folder/"
  for name in "$folder"/* "$folder"/.[!.]*; do printf '%s\\0' "${name##*/}"; done | head -c 20000
fi
"""
# $1 the folder, $2 the most bytes: NUL-ended names, two levels deep, folders with a slash.
_LIST = """
cd "$1/" || exit 1
list() {
  for name in "$1"*; do
    if [ -d "$name" ] && [ ! -L "$name" ]; then
      printf '%s/\\0' "$name"
      [ -n "$1" ] || list "$name/"
    elif [ -e "$name" ] || [ -L "$name" ]; then
      printf '%s\\0' "$name"
    fi
  done
}
list '' | head -c "$2"
"""
# $1 the path, $2 and $3 the lines, $4 the most bytes.
_RANGE = """sed -n "$2,$3p;$3q" "$1" | head -c "$4" """
# The new content is complete in a file beside before the old one is touched. That one is then
# overwritten without being emptied first: its inode, mode, owner and links stay, and so do its
# blocks, so that the old content has room to be put back.
_FILL = """
cat "$from" 1<> "$1" &&
dd if=/dev/null of="$1" bs=1 seek="$2" count=0 2>/dev/null && [ "$(wc -c < "$1")" -eq "$2" ]
"""
_BESIDE = """
from=${1%/*}/.edit-$3
trap 'rm -f "$from"' EXIT
"""
_STAGE = """
cat > "$from" && [ "$(wc -c < "$from")" -eq "$2" ] || exit 50
"""
# $1 the path, $2 the size of what comes on the standard input, $3 a name that nobody has.
_WRITE = f"""{_BESIDE}
{{ true > "$from"; }} 2>/dev/null || from="/tmp/.edit-$3"
{_STAGE}
true 1<> "$1" || exit 52
{{ {_FILL} }} || exit 51
"""
_PUT_BACK = f"from=-\n{_FILL}"
_CREATE = f"""
mkdir -p "${{1%/*}}/" || exit 52
[ ! -e "$1" ] && [ ! -L "$1" ] || exit 53
{_BESIDE}{_STAGE}
ln "$from" "$1" 2>/dev/null || mv "$from" "$1" || exit 52
"""
_REMOVE = 'rm -f "$1"'


@dataclass(frozen=True, kw_only=True)
class Found:
    """Hold what stands at a path.

    `data` is a file's content, None where it is larger than was asked for. `reason` says why
    nothing is there, `near` names what is, in the last folder of the path that exists.
    """

    kind: Literal["file", "folder", "special", "absent"]
    size: int = 0
    data: bytes | None = None
    reason: str = ""
    near: tuple[str, ...] = field(default_factory=tuple)


class EditorFiles:
    """Look at and change files of one sandbox within one call of the editor."""

    def __init__(
        self, sandbox: SandboxAccess, *, timeout_seconds: float, cancelled: Callable[[], bool]
    ) -> None:
        self._sandbox = sandbox
        self._seconds = min(CALL_SECONDS, timeout_seconds)
        self._cancelled = cancelled

    def look(self, path: str, *, max_bytes: int) -> Found:
        """Return what stands at an absolute path; raises EditRefused for what cannot be read."""
        result = self._run(_LOOK, path, str(max_bytes), output_bytes=2 * max_bytes + _MESSAGE_BYTES)
        try:
            return _parse(path, result, max_bytes)
        except ValueError:  # the programs in there are the policy's to replace
            raise EditRefused(f"{path} cannot be read: the sandbox's shell is not itself") from None

    def list(self, path: str, *, max_bytes: int) -> tuple[Sequence[str], bool]:
        """Return a folder's entries, hidden ones excepted, and whether some are left out."""
        result = self._run(_LIST, path, str(max_bytes), output_bytes=2 * max_bytes)
        if result.exit_code != 0:
            raise EditRefused(f"{path} cannot be read: {_why(result)}")
        *names, _cut = result.stdout.decode("utf-8", "replace").split("\0")
        return names, len(result.stdout) >= max_bytes

    def read_lines(self, path: str, first: int, last: int, *, max_bytes: int) -> bytes:
        """Return some lines of a file too large to be read whole."""
        words = (path, str(first), str(last), str(max_bytes))
        result = self._run(_RANGE, *words, output_bytes=2 * max_bytes)
        if result.exit_code != 0:
            raise EditRefused(f"{path} cannot be read: {_why(result)}")
        return result.stdout

    def write(self, path: str, data: bytes, *, old: bytes) -> None:
        """Overwrite a file in place; raises EditRefused, and then `old` is still its content."""
        result = self._run(_WRITE, path, str(len(data)), secrets.token_hex(8), stdin=data)
        if result.exit_code == 0:
            return
        why = _why(result)
        if result.exit_code == 51:
            self._run(_PUT_BACK, path, str(len(old)), stdin=old)
            if self.look(path, max_bytes=len(old)).data != old:
                raise EditRefused(f"{path} is damaged, look at it: writing it ended with: {why}")
        raise EditRefused(f"{path} was not changed, it could not be written: {why}")

    def create(self, path: str, data: bytes) -> None:
        """Write a new file and its missing folders; raises EditRefused, never overwrites."""
        result = self._run(_CREATE, path, str(len(data)), secrets.token_hex(8), stdin=data)
        if result.exit_code == 53:
            raise EditRefused(f"{path} exists already, perhaps as a link to a missing file.")
        if result.exit_code != 0:
            raise EditRefused(f"{path} could not be created: {_why(result)}")

    def remove(self, path: str) -> None:
        """Delete a file; raises EditRefused."""
        result = self._run(_REMOVE, path)
        if result.exit_code != 0:
            raise EditRefused(f"{path} could not be removed: {_why(result)}")

    def _run(
        self, script: str, *words: str, stdin: bytes = b"", output_bytes: int = _MESSAGE_BYTES
    ) -> ExecResult:
        result = self._sandbox.run(
            ["/bin/sh", "-c", script, "sh", *words],
            stdin=stdin,
            timeout_seconds=self._seconds,
            output_bytes=output_bytes,
            cancelled=self._cancelled,
        )
        if result.timed_out or result.cancelled:
            raise EditRefused(
                f"The editor was stopped before it was done ({self._seconds:g} s are its most); "
                "look at the file before you go on."
            )
        return result


def _parse(path: str, result: ExecResult, max_bytes: int) -> Found:
    """Return what the look at a path found; raises ValueError for what it cannot have said."""
    head, _, rest = result.stdout.partition(b"\n")
    kind, _, size = head.decode("ascii", "replace").partition(" ")
    if kind == "folder":
        return Found(kind="folder")
    if kind == "special":
        return Found(kind="special")
    if kind == "absent":
        said, folder, *names = rest.decode("utf-8", "replace").split("\0")
        reason = _last_words(said) or MISSING
        near = _nearest(path, folder, names) if reason == MISSING else ()
        return Found(kind="absent", reason=reason, near=near)
    if kind != "file" or result.exit_code != 0:
        raise EditRefused(f"{path} cannot be read: {_why(result)}")
    fits = int(size) <= max_bytes
    if fits and len(rest) > max_bytes:  # it grew, or its file system tells no size
        return Found(kind="file", size=len(rest))
    return Found(kind="file", size=int(size), data=rest if fits else None)


def _nearest(path: str, folder: str, names: Sequence[str]) -> tuple[str, ...]:
    """Return the paths in the folder most like the next part of a path that is not there."""
    part = path[len(folder) :].split("/")[0]
    close = difflib.get_close_matches(part[:255], names, n=3, cutoff=0.5)
    return tuple(folder + name for name in close)


def _last_words(text: str) -> str:
    """Return what comes last in `ls: cannot access 'x': No such file or directory`."""
    return text.strip().rsplit(": ", 1)[-1]


def _why(result: ExecResult) -> str:
    said = _last_words(result.stderr.decode("utf-8", "replace"))
    return said[-500:] or f"exit code {result.exit_code}"
