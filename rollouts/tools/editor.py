"""View and edit files of the sandbox; the text work is done here, on the worker's side."""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rollouts.tools.base import InvalidArguments, Tool, ToolContext, ToolResult, ToolUnavailable
from rollouts.tools.editing import (
    BinaryContent,
    Document,
    Edit,
    EditRefused,
    count_lines,
    decode,
    insert_after,
    line_ends,
    number_lines,
    replace_once,
    snippet,
    split_lines,
)
from rollouts.tools.editor_files import MISSING, EditorFiles, Found
from rollouts.tools.editor_history import EditHistory, digest

if TYPE_CHECKING:
    from sandboxes.runtime.sessions import ShellSession

MAX_TEXT_CHARACTERS = 1_000_000
MAX_PATH_CHARACTERS = 4096
HISTORY_BYTES = 16 * 1024 * 1024

_NEEDED = {
    "view": (),
    "create": ("file_text",),
    "str_replace": ("old_str",),
    "insert": ("insert_line", "new_str"),
    "undo": (),
}
_TEXTS = ("path", "file_text", "old_str", "new_str")


class EditorTool(Tool):
    """Offer view, create, str_replace, insert and undo on text files of the sandbox.

    Made anew for each episode: what undo knows is kept here. As with the tools that models know
    this form from, create never overwrites. A file keeps its encoding, line ends, mode, owner and
    links; files above `max_edit_bytes` are viewed in parts and not edited. An observation carries
    about `output_bytes`.
    """

    name = "editor"
    description = (
        "View, create and edit text files. Commands: view shows a file with line numbers, or a "
        "folder two levels deep; create makes a new file and its folders, and never overwrites; "
        "str_replace replaces old_str, which must occur exactly once, whitespace included, by "
        "new_str; insert puts new_str as whole lines after line insert_line; undo takes back the "
        "last edit of that file."
    )
    parameters: Mapping[str, Any] = {
        "type": "object",
        "properties": {
            "command": {
                "type": "string",
                "enum": ["view", "create", "str_replace", "insert", "undo"],
                "description": "What to do.",
            },
            "path": {
                "type": "string",
                "minLength": 1,
                "maxLength": MAX_PATH_CHARACTERS,
                "description": "Absolute path of the file or folder, such as /app/main.py.",
            },
            "view_range": {
                "type": "array",
                "items": {"type": "integer"},
                "minItems": 2,
                "maxItems": 2,
                "description": "For view: first and last line, from 1; -1 is the end.",
            },
            "file_text": {
                "type": "string",
                "maxLength": MAX_TEXT_CHARACTERS,
                "description": "For create: the whole content.",
            },
            "old_str": {
                "type": "string",
                "maxLength": MAX_TEXT_CHARACTERS,
                "description": "For str_replace: the text to replace, without line numbers.",
            },
            "new_str": {
                "type": "string",
                "maxLength": MAX_TEXT_CHARACTERS,
                "description": "For str_replace (default: nothing) and insert: the new text.",
            },
            "insert_line": {
                "type": "integer",
                "minimum": 0,
                "description": "For insert: the line to insert after; 0 is the top of the file.",
            },
        },
        "required": ["command", "path"],
        "additionalProperties": False,
    }

    def __init__(
        self, *, output_bytes: int = 16_384, max_edit_bytes: int = 4 * 1024 * 1024
    ) -> None:
        self.output_bytes = output_bytes
        self.max_edit_bytes = max_edit_bytes
        self._history = EditHistory(HISTORY_BYTES)

    def call(self, arguments: Mapping[str, Any], context: ToolContext) -> ToolResult:
        """Do what the command says; what the file system refuses is an observation.

        Raises `ToolUnavailable` without a sandbox, faults of the sandbox.
        """
        given = {name: value for name, value in arguments.items() if value is not None}
        self.check(given)
        path = _checked_path(given, context.shell)
        if context.sandbox is None:
            raise ToolUnavailable("the editor tool needs a sandbox, and this rollout has none")
        sandbox = context.sandbox
        files = EditorFiles(
            sandbox,
            timeout_seconds=context.timeout_seconds,
            cancelled=context.cancelled,
        )
        commands: dict[str, Callable[[], str]] = {
            "view": lambda: self._view(files, path, given.get("view_range")),
            "create": lambda: self._create(files, path, given["file_text"]),
            "str_replace": lambda: self._edit(
                files,
                path,
                lambda text: replace_once(text, given["old_str"], given.get("new_str", "")),
            ),
            "insert": lambda: self._edit(
                files,
                path,
                lambda text: insert_after(text, given["insert_line"], given["new_str"]),
            ),
            "undo": lambda: self._undo(files, path, resumed=sandbox.resumed),
        }
        try:
            content, failed = commands[given["command"]](), False
        except EditRefused as refusal:
            content, failed = str(refusal), True
        return ToolResult(
            content=content,
            data={"command": given["command"], "path": path, "failed": failed},
        )

    def _view(self, files: EditorFiles, path: str, span: Sequence[int] | None) -> str:
        first, last = span or (1, -1)
        if first < 1 or (last != -1 and last < first):
            raise EditRefused(
                f"view_range is [{first}, {last}]; it must be [first, last] with first from 1, "
                "and last not before it, or -1."
            )
        found = files.look(path, max_bytes=self.max_edit_bytes)
        if found.kind == "folder":
            return self._view_folder(files, path)
        _require_file(path, found)
        if found.data is None:
            return self._view_part(files, path, found.size, first, last)
        text = _decode(path, found.data).text
        lines = split_lines(text)
        if not lines:
            return f"{path} is empty."
        if first > len(lines):
            raise EditRefused(f"{path} has {len(lines)} lines; there is no line {first}.")
        wanted = lines[first - 1 : None if last == -1 else last]
        shown, count = self._fit(number_lines(wanted, first))
        notes = []
        if count < len(wanted):
            notes.append(
                f"[lines {first} to {first + count - 1} of {len(lines)} are shown; "
                "view the others with view_range]"
            )
        ends = {"crlf": "CRLF", "mixed": "CRLF and LF, mixed"}.get(line_ends(text))
        if ends:
            notes.append(f"[the lines end with {ends}]")
        return "\n".join([*shown, *notes])

    def _view_part(self, files: EditorFiles, path: str, size: int, first: int, last: int) -> str:
        """View some lines of a file that is too large to be read whole."""
        most = first + self.output_bytes // 8
        last = most if last == -1 else min(last, most)
        data = files.read_lines(path, first, last, max_bytes=4 * self.output_bytes)
        if b"\0" in data:
            raise EditRefused(_binary(path, size))
        lines = split_lines(data.decode("utf-8", "replace"))
        if not lines:
            raise EditRefused(f"{path} has fewer than {first} lines.")
        shown, count = self._fit(number_lines(lines, first))
        return "\n".join(
            [
                *shown,
                f"[lines {first} to {first + count - 1} of a file of {size} bytes are shown; "
                "view others with view_range]",
            ]
        )

    def _view_folder(self, files: EditorFiles, path: str) -> str:
        names, cut = files.list(path, max_bytes=self.output_bytes)
        shown = [name.encode("unicode_escape").decode() if "\n" in name else name for name in names]
        lines = [f"{path.rstrip('/')}/ (two levels deep, hidden files excepted)", *shown]
        if not names:
            lines.append("(nothing)")
        if cut:
            lines.append("[there is more; view the folders one by one, or use ls]")
        return "\n".join(lines)

    def _create(self, files: EditorFiles, path: str, text: str) -> str:
        found = files.look(path, max_bytes=0)
        if found.kind == "folder":
            raise EditRefused(f"{path} is a folder.")
        if found.kind != "absent":
            raise EditRefused(
                f"{path} exists already, and create does not overwrite: edit it with str_replace, "
                "or remove it first."
            )
        if found.reason != MISSING:
            raise EditRefused(f"{path} could not be created: {found.reason}.")
        data = text.encode()
        if len(data) > self.max_edit_bytes:
            raise EditRefused(_too_large(path, len(data), self.max_edit_bytes))
        files.create(path, data)
        self._history.keep(path, None, data)
        return f"{path} is created, with {count_lines(text)} lines."

    def _edit(self, files: EditorFiles, path: str, change: Callable[[str], Edit]) -> str:
        document, old = self._read(files, path)
        edit = change(document.text)
        new = Document(edit.text, document.encoding, document.mark).encode()
        if len(new) > self.max_edit_bytes:
            raise EditRefused(_too_large(path, len(new), self.max_edit_bytes))
        files.write(path, new, old=old)
        self._history.keep(path, old, new)
        return "\n".join([f"{path} is edited. Around the change it reads:", *self._around(edit)])

    def _undo(self, files: EditorFiles, path: str, *, resumed: bool) -> str:
        last = self._history.last(path)
        if last is None:
            lost = " Edits made before another machine took over are not known." if resumed else ""
            raise EditRefused(f"There is no edit of {path} to undo.{lost}")
        found = files.look(path, max_bytes=self.max_edit_bytes)
        _require_file(path, found)
        if found.data is None or digest(found.data) != last.after:
            raise EditRefused(
                f"{path} was changed by something else since its last edit, and undo would lose "
                "that: nothing was changed."
            )
        if last.before is None:
            files.remove(path)
        else:
            files.write(path, last.before, old=found.data)
        self._history.forget(last)
        if last.before is None:
            return f"{path} is removed: its creation is undone."
        return f"The last edit of {path} is undone."

    def _read(self, files: EditorFiles, path: str) -> tuple[Document, bytes]:
        found = files.look(path, max_bytes=self.max_edit_bytes)
        if found.kind == "folder":
            raise EditRefused(f"{path} is a folder; only view works on it.")
        _require_file(path, found)
        if found.data is None:
            raise EditRefused(_too_large(path, found.size, self.max_edit_bytes))
        return _decode(path, found.data), found.data

    def _around(self, edit: Edit) -> list[str]:
        shown, count = self._fit(lines := snippet(edit))
        return shown if count == len(lines) else [*shown, "[the rest of the change is not shown]"]

    def _fit(self, lines: Sequence[str]) -> tuple[list[str], int]:
        """Return as many of the lines as an observation carries, one at least, and how many."""
        left = self.output_bytes
        for count, line in enumerate(lines):
            left -= len(line.encode("utf-8", "replace")) + 1
            if left < 0 and count:
                return list(lines[:count]), count
        return list(lines), len(lines)


def _checked_path(arguments: Mapping[str, Any], shell: ShellSession | None) -> str:
    """Return the path; raises InvalidArguments for what the schema cannot say."""
    command, path = arguments["command"], arguments["path"]
    missing = [name for name in _NEEDED[command] if name not in arguments]
    if missing:
        raise InvalidArguments(f"The command {command} also needs {' and '.join(missing)}.")
    for name in _TEXTS:
        text = arguments.get(name, "")
        if "\0" in text:
            raise InvalidArguments(f"{name} holds a NUL character.")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidArguments(f"{name} is not valid Unicode text.") from error
    if not path.startswith("/"):
        folder = shell.state().cwd if shell is not None else "/"
        meant = posixpath.normpath(posixpath.join(folder, path))
        hint = "" if path.startswith("~") else f" Maybe you meant {meant}."
        raise InvalidArguments(f"The path {path} is not absolute: it must begin with /.{hint}")
    return str(path).rstrip("/") or "/"


def _require_file(path: str, found: Found) -> None:
    if found.kind == "special":
        raise EditRefused(f"{path} is neither a file nor a folder (a device, a pipe or a socket).")
    if found.kind == "absent":
        hint = f" Did you mean {', '.join(found.near)}?" if found.near else ""
        raise EditRefused(f"{path}: {found.reason}.{hint}")


def _decode(path: str, data: bytes) -> Document:
    try:
        return decode(data)
    except BinaryContent:
        raise EditRefused(_binary(path, len(data))) from None


def _binary(path: str, size: int) -> str:
    return f"{path} is a binary file of {size} bytes; look at it with a program such as od or file."


def _too_large(path: str, size: int, most: int) -> str:
    return (
        f"{path} has {size} bytes, and the editor edits files of {most} bytes at most; "
        "use sed or a script."
    )
