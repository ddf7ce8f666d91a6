"""Environments as files: exported as TOML, imported from it, and compared version by version."""

import base64
import difflib
import json
import tomllib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from django.core.exceptions import ValidationError
from django.db import transaction

from rollouts.exceptions import InvalidValue, StateConflict
from rollouts.services.environment_check import environment_errors
from rollouts.services.environment_toml import (
    IMAGE_VALUES,
    JSON_SUFFIX,
    LISTS,
    NUMBERS,
    OBJECTS,
    TEXTS,
    WORDS,
    write_toml,
)
from sandboxes.models import Environment, Image
from sandboxes.services.catalogue import ENVIRONMENT_VALUES, save_environment
from sandboxes.services.images import define_image

CODE = "environment.invalid_file"
MAX_TOML_BYTES = 4 * 1024**2
MAX_LINES = 3000  # of one value: comparing takes the square of it
MAX_LINE = 2000
_JSON_VALUES = (*OBJECTS, *LISTS)
_KNOWN = {
    *("name", "image", "files", *TEXTS, *WORDS, *NUMBERS, *_JSON_VALUES),
    *(name + JSON_SUFFIX for name in _JSON_VALUES),
}
_KNOWN_IMAGE = {"name", *IMAGE_VALUES, "files" + JSON_SUFFIX, "parameters" + JSON_SUFFIX}


@dataclass(frozen=True)
class Difference:
    """What differs in one value: (`same`, `removed`, `added` or `place`, the line's text)."""

    name: str
    lines: list[tuple[str, str]]


def export_environment(*, environment: Environment) -> str:
    """Return a version as TOML, which imports to equal values."""
    return write_toml(environment)


def import_environment(*, text: str) -> Environment:
    """Return the version that a TOML text describes, made where the newest one differs.

    Its image is made too where the catalogue has none of that name. Raises InvalidValue, which
    names the key at fault, and StateConflict for an image that is there and made from other things.
    """
    table = _parse(text)
    _refuse_unknown(table, _KNOWN, "")
    name = table.pop("name", None)
    if not isinstance(name, str):
        raise InvalidValue('name is missing: write name = "..." at the top.', code=CODE)
    given = _unfolded(table, _JSON_VALUES, "")
    image = given.pop("image", None)
    values = {**given, "files": _files(given.get("files", {}))}
    try:
        with transaction.atomic():
            values["image"] = None if image is None else _image(image)
            _check(name, values)
            return save_environment(name=name, **values)
    except ValidationError as error:
        raise InvalidValue(_said(error), code=CODE) from None


def diff_environments(*, before: Environment, after: Environment) -> list[Difference]:
    """Return what differs between two versions, value by value, as unified differences."""
    found = []
    for name in ENVIRONMENT_VALUES:
        one, other = _shown(before, name), _shown(after, name)
        if one != other:
            found.append(Difference(name, list(_lines(one, other))))
    return found


def _parse(text: str) -> dict[str, Any]:
    if len(text.encode(errors="replace")) > MAX_TOML_BYTES:
        raise InvalidValue(f"The file has more than {MAX_TOML_BYTES} bytes.", code=CODE)
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, ValueError, RecursionError) as error:
        raise InvalidValue(f"It is no TOML: {error or 'nested too deep'}.", code=CODE) from None


def _refuse_unknown(table: Mapping[str, Any], known: Collection[str], where: str) -> None:
    unknown = sorted(set(table) - set(known))
    if unknown:
        raise InvalidValue(
            f"{where}{unknown[0]} is no key of an environment; known: {', '.join(sorted(known))}.",
            code=CODE,
        )


def _unfolded(table: Mapping[str, Any], names: Collection[str], where: str) -> dict[str, Any]:
    """Return a table in which what was written as JSON is what it says."""
    found = dict(table)
    for name in names:
        text = found.pop(name + JSON_SUFFIX, None)
        if text is None:
            continue
        if name in found:
            raise InvalidValue(f"Give either {where}{name} or {name}{JSON_SUFFIX}.", code=CODE)
        try:
            found[name] = json.loads(text)
        except (TypeError, ValueError, RecursionError):
            raise InvalidValue(f"{where}{name}{JSON_SUFFIX} is no JSON text.", code=CODE) from None
    return found


def _files(table: Any) -> dict[str, dict[str, Any]]:
    if not isinstance(table, dict):
        raise InvalidValue('files must be tables: [files."path/below/setup"].', code=CODE)
    found = {}
    for path, entry in table.items():
        where = f'files."{path}"'
        if not isinstance(entry, dict):
            raise InvalidValue(f"{where} must be a table with text or base64.", code=CODE)
        _refuse_unknown(entry, ("text", "base64", "mode"), f"{where}.")
        contents = [entry[key] for key in ("text", "base64") if key in entry]
        if len(contents) != 1 or not isinstance(contents[0], str):
            raise InvalidValue(f"{where} needs either text or base64.", code=CODE)
        encoded = contents[0]
        if "text" in entry:
            encoded = base64.b64encode(encoded.encode()).decode()
        found[path] = {"base64": encoded, "mode": entry.get("mode", 0o644)}
    return found


def _image(table: Any) -> Image:
    """Return the image that a file names. Raises InvalidValue, StateConflict, ValidationError."""
    if isinstance(table, str):
        table = {"name": table}
    if not isinstance(table, dict) or not isinstance(table.get("name"), str):
        raise InvalidValue("image must be a name, or a table with name and source.", code=CODE)
    _refuse_unknown(table, _KNOWN_IMAGE, "image.")
    values = _unfolded(table, ("files", "parameters"), "image.")
    name = values.pop("name")
    present = Image.objects.filter(name=name).first()
    if not values:
        if present is None:
            raise InvalidValue(f"There is no image {name!r}: give image.source too.", code=CODE)
        return present
    if "source" not in values:
        raise InvalidValue("image.source is missing.", code=CODE)
    if present is None:
        return define_image(name=name, **values)
    blank = Image()
    for key in IMAGE_VALUES:
        wanted = values.get(key, getattr(blank, key))
        if getattr(present, key) != wanted:
            raise StateConflict(
                f"Image {name} is here and its {key} is another: rename the one in the file, or "
                "write its name alone to take the one that is here.",
                code="image.differs",
            )
    return present


def _check(name: str, values: Mapping[str, Any]) -> None:
    """Refuse what no worker could run. Raises InvalidValue."""
    candidate = Environment(name=name, version=1, **values)
    whole = {each: getattr(candidate, each) for each in ENVIRONMENT_VALUES}
    for key in (*TEXTS, *WORDS):
        if not isinstance(whole[key], str):
            raise InvalidValue(f"{key} must be a text.", code=CODE)
    if type(whole["warm"]) is not int:
        raise InvalidValue("warm must be a whole number.", code=CODE)
    for key, reason in environment_errors(whole):
        raise InvalidValue(f"{key}: {reason}", code=CODE)


def _said(error: ValidationError) -> str:
    if hasattr(error, "error_dict"):
        return " ".join(f"{key}: {' '.join(said)}" for key, said in error.message_dict.items())
    return " ".join(error.messages)


def _shown(environment: Environment, name: str) -> list[str]:
    """Return one value as lines."""
    value = getattr(environment, name)
    if name == "image":
        return [] if value is None else [f"{value.name} from {value.source}"]
    if name == "files":
        return [line for path in sorted(value) for line in _shown_file(path, value[path])]
    if isinstance(value, str):
        return value.splitlines()
    if value in ({}, []):
        return []
    return json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False).splitlines()


def _shown_file(path: str, entry: Mapping[str, Any]) -> Iterator[str]:
    data = base64.b64decode(entry["base64"])
    yield f"--- {path} ({len(data)} bytes, mode {entry['mode']:o})"
    try:
        yield from data.decode().splitlines()
    except ValueError:
        yield entry["base64"]


def _lines(one: list[str], other: list[str]) -> Iterator[tuple[str, str]]:
    if max(len(one), len(other)) > MAX_LINES:
        yield "place", f"{len(one)} and {len(other)} lines: too many to compare"
        return
    for line in list(difflib.unified_diff(one, other, n=3, lineterm=""))[2:]:
        kind = {"-": "removed", "+": "added", "@": "place"}.get(line[0], "same")
        text = line if kind == "place" else line[1:]
        left = len(text) - MAX_LINE
        yield kind, f"{text[:MAX_LINE]} [{left} more characters]" if left > 0 else text
