"""Definition files from Jinja2 templates, rendered where nothing can be read and time ends."""

from __future__ import annotations

import json
import os
import resource
import select
import shlex
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from jinja2 import StrictUndefined, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from sandboxes.images.exceptions import ImageBuildFailed, ReferenceInvalid

FOLDER = Path(__file__).with_name("templates")
SUFFIX = ".def.j2"
MAX_RENDERED_BYTES = 1024 * 1024
RENDER_SECONDS = 5.0
_RENDER_MEMORY = 512 * 1024**2
_CHUNK = 65536


def template_names() -> list[str]:
    """Return the names of the shipped templates, sorted."""
    return sorted(path.name.removesuffix(SUFFIX) for path in FOLDER.glob(f"*{SUFFIX}"))


def shipped_template(name: str) -> str:
    """Return the text of a shipped template; raises ReferenceInvalid."""
    if name not in template_names():
        known = ", ".join(template_names())
        raise ReferenceInvalid(f"there is no template {name!r}; shipped: {known}")
    return (FOLDER / f"{name}{SUFFIX}").read_text()


def render(text: str, values: Mapping[str, Any]) -> str:
    """Return the rendered template; raises ImageBuildFailed.

    It has no loader, so that it can include nothing; an unknown name is an error. Call
    `render_bounded` for a text that somebody else wrote.
    """
    environment = ImmutableSandboxedEnvironment(
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.filters |= {"word": _word, "line": _line}
    parts: list[str] = []
    size = 0
    try:
        for part in environment.from_string(text).generate(dict(values)):
            size += len(part.encode())
            if size > MAX_RENDERED_BYTES:
                raise ImageBuildFailed(f"the template gives more than {MAX_RENDERED_BYTES} bytes")
            parts.append(part)
    except (TemplateError, ArithmeticError, TypeError, ValueError, LookupError) as fault:
        raise ImageBuildFailed(f"the template cannot be rendered: {fault}") from None
    except (MemoryError, RecursionError) as fault:
        raise ImageBuildFailed(f"the template wants too much: {type(fault).__name__}") from None
    return "".join(parts)


def load_all() -> None:
    """Load what rendering loads late: the account that a process drops to may not read it."""
    for text in ("{{ 'loaded' | word }}", "{{ missing }}", "{% broken"):
        with suppress(ImageBuildFailed):
            render(text, {})


def render_bounded(text: str, values: Mapping[str, Any], *, seconds: float = RENDER_SECONDS) -> str:
    """Render in a child process of bounded time and memory; raises ImageBuildFailed.

    Call it in a process of one thread: it forks.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reader)
            _bound(seconds)
            _write(writer, _attempt(text, values))
        finally:
            os._exit(0)
    os.close(writer)
    try:
        answer = _read(reader, time.monotonic() + seconds)
    finally:
        os.close(reader)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    if answer is None:
        raise ImageBuildFailed(f"the template did not end within {seconds:g} s, or ate its memory")
    if "fault" in answer:
        raise ImageBuildFailed(answer["fault"])
    return str(answer["text"])


def _word(value: object) -> str:
    """Quote a value as one word of a shell command."""
    return shlex.quote(_line(value))


def _line(value: object) -> str:
    """Return a value as text; raises ValueError when it would not stay on its line."""
    text = str(value)
    if any(ord(character) < 32 or ord(character) == 127 for character in text):
        raise ValueError(f"must be one line: {text[:100]!r}")
    return text


def _bound(seconds: float) -> None:
    whole = max(1, int(seconds))
    resource.setrlimit(resource.RLIMIT_CPU, (whole, whole + 1))
    resource.setrlimit(resource.RLIMIT_AS, (_RENDER_MEMORY, _RENDER_MEMORY))


def _attempt(text: str, values: Mapping[str, Any]) -> dict[str, str]:
    try:
        return {"text": render(text, values)}
    except ImageBuildFailed as fault:
        return {"fault": str(fault)[:2000]}


def _write(descriptor: int, answer: dict[str, str]) -> None:
    data = json.dumps(answer).encode()
    while data:
        data = data[os.write(descriptor, data) :]


def _read(descriptor: int, deadline: float) -> dict[str, str] | None:
    """Return the child's answer; None when it gave none in time."""
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    data = bytearray()
    while (left := deadline - time.monotonic()) > 0:
        if not poller.poll(left * 1000):
            break
        chunk = os.read(descriptor, _CHUNK)
        if not chunk:
            return dict(json.loads(data)) if data else None
        data += chunk
    return None
