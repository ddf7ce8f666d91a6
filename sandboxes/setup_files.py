"""An environment's own files and secrets as the catalogue holds them: JSON that is checked here."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any

MAX_FILES = 1000
MAX_FILES_BYTES = 1024**2
MAX_SECRETS = 50
VARIABLE_PREFIX = "PRORL_SECRET_"
RESERVED = "KEY"  # PRORL_SECRET_KEY signs this service's own sessions
LEAST_SECRET = 6  # characters
SECRET_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
SECRET_USES = ("setup", "tools", "evaluator")
ENV_REFERENCE = re.compile(r"env:[A-Za-z_][A-Za-z0-9_]{0,99}")
FILE_REFERENCE = re.compile(r"file:[^\0\n]{1,300}")


def file_errors(files: Any) -> Iterator[str]:
    """Yield what is wrong with files: `{path: {"base64": str, "mode": int}}`, in few words each."""
    if not isinstance(files, dict):
        yield "It must be an object: path to base64 and mode."
        return
    if len(files) > MAX_FILES:
        yield f"There are {len(files)} files; at most {MAX_FILES} are kept here: use an image."
        return
    size = 0
    paths = {PurePosixPath(path) for path in files}
    for path, entry in files.items():
        reason = _file_error(path, entry)
        if reason is None and paths & set(PurePosixPath(path).parents):
            reason = "lies below another file"
        if reason is not None:
            yield f"{path[:200]!r} {reason}."
            return
        size += decoded_size(entry["base64"])
    if size > MAX_FILES_BYTES:
        yield f"They have {size} bytes; at most {MAX_FILES_BYTES} are kept here: use an image."


def read_files(files: Mapping[str, Any]) -> dict[str, tuple[bytes, int]]:
    """Return checked files as bytes and permission bits by relative path."""
    return {path: (base64.b64decode(each["base64"]), each["mode"]) for path, each in files.items()}


def decoded_size(encoded: str) -> int:
    """Return how many bytes a base64 text holds."""
    return len(encoded) * 3 // 4 - encoded[-2:].count("=")


def secret_errors(secrets: Any) -> Iterator[str]:
    """Yield what is wrong with secrets: `{NAME: {"from": reference, "to": [uses]}}`.

    A reference is `env:NAME` or `file:PATH`; a value in its place is refused by its form.
    """
    if not isinstance(secrets, dict):
        yield 'It must be an object such as {"TOKEN": {"from": "env:TOKEN", "to": ["tools"]}}.'
        return
    if len(secrets) > MAX_SECRETS:
        yield f"There are {len(secrets)} secrets; at most {MAX_SECRETS} can be named."
        return
    for name, entry in secrets.items():
        reason = _secret_error(name, entry)
        if reason is not None:
            yield f"{name[:64]!r}: {reason}."
            return


def secrets_for(secrets: Mapping[str, Any], use: str) -> dict[str, str]:
    """Return the references of the secrets that one use is given, by name."""
    return {name: entry["from"] for name, entry in secrets.items() if use in entry["to"]}


def telling_parts(secrets: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return the lines of secrets' values that can be looked for, longest first, with their names.

    What is shorter stands in many a text by chance.
    """
    parts = {
        (name, line)
        for name, value in secrets.items()
        for line in value.splitlines()
        if len(line.strip()) >= LEAST_SECRET
    }
    return sorted(parts, key=lambda each: (-len(each[1]), each))


def mask(text: str, secrets: Mapping[str, str]) -> str:
    """Return a text in which the values of secrets are replaced by their names."""
    for name, part in telling_parts(secrets):
        text = text.replace(part, f"[secret {name}]")
    return text


def _file_error(path: str, entry: Any) -> str | None:
    parts = PurePosixPath(path).parts
    is_plain = path.isprintable() and path == "/".join(parts) and len(path) <= 400
    if not parts or path.startswith("/") or ".." in parts or not is_plain:
        return "is no plain relative path"
    if not isinstance(entry, dict) or set(entry) != {"base64", "mode"}:
        return "must hold base64 and mode"
    if type(entry["mode"]) is not int or not 0 <= entry["mode"] <= 0o777:
        return "has a mode that is not 0 to 0o777"
    try:
        base64.b64decode(entry["base64"], validate=True)
    except (TypeError, ValueError, binascii.Error):
        return "is not base64"
    return None


def _secret_error(name: str, entry: Any) -> str | None:
    if not SECRET_NAME.fullmatch(name):
        return "a name is up to 64 letters, digits and _, as of an environment variable"
    if not isinstance(entry, dict) or set(entry) != {"from", "to"}:
        return 'give "from", a reference, and "to", where it goes'
    source, uses = entry["from"], entry["to"]
    # The value itself must not come into the catalogue, nor into this message.
    if not isinstance(source, str) or not (
        ENV_REFERENCE.fullmatch(source) or FILE_REFERENCE.fullmatch(source)
    ):
        return '"from" must be env:NAME or file:PATH, never the value'
    if source == f"env:{RESERVED}":
        return f"{VARIABLE_PREFIX}{RESERVED} is the service's own; give the secret another variable"
    known = isinstance(uses, list) and uses and all(each in SECRET_USES for each in uses)
    if not known or len(set(uses)) != len(uses):
        return f'"to" must list some of {", ".join(SECRET_USES)}, each once'
    return None
