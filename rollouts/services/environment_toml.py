"""An environment as TOML text: written so that it reads well, and checked to read back the same.

TOML has no null, and not every JSON text survives every way of writing it. What would not come back
as it was is written as JSON under `<name>_json`.
"""

import base64
import json
import tomllib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import tomlkit
from tomlkit import TOMLDocument
from tomlkit.items import Integer, Item, String, StringType, Table, Trivia

from sandboxes.models import Environment, Image

IMAGE_VALUES = ("source", "definition", "files", "parameters", "reuse", "lock")
TEXTS = ("description", "setup", "system_prompt")
# Values that are JSON, each of which may be written as such instead.
OBJECTS = ("agent_settings", "tool_settings", "limits", "evaluator_settings", "secrets")
LISTS = ("tools", "egress_hosts")
WORDS = ("workdir", "agent", "prompt_format", "network", "gpu", "evaluator")
NUMBERS = ("warm",)
JSON_SUFFIX = "_json"


def write_toml(environment: Environment) -> str:
    """Return one version as TOML; `image` must have been read along. Empty values are left out."""
    document = tomlkit.document()
    document.add(tomlkit.comment(f"Environment {environment.ref}; read it in with `import`."))
    document.add("name", _text(environment.name))
    for name in ("description", *WORDS, *NUMBERS, *LISTS, "setup", "system_prompt"):
        value = getattr(environment, name)
        if value not in ("", []):
            _add(document, name, value)
    if environment.image is not None:
        document.add("image", _image(environment.image))
    for name in OBJECTS:
        if getattr(environment, name):
            _add(document, name, getattr(environment, name))
    if environment.files:
        files = tomlkit.table(is_super_table=True)
        for path, entry in sorted(environment.files.items()):
            files.add(path, _file(entry))
        document.add("files", files)
    return tomlkit.dumps(document)


def _image(image: Image) -> Table:
    table = tomlkit.table()
    table.add("name", _text(image.name))
    for name in IMAGE_VALUES:
        value = getattr(image, name)
        if value and (name != "reuse" or value != "versioned"):
            _add(table, name, value)
    return table


def _file(entry: Mapping[str, Any]) -> Table:
    table = tomlkit.table()
    data = base64.b64decode(entry["base64"])
    try:
        table.add("text", _text(data.decode()))
    except ValueError:
        table.add("base64", _text(entry["base64"]))
    mode = entry["mode"]
    table.add("mode", Integer(mode, Trivia(), f"0o{mode:03o}"))
    return table


def _add(parent: TOMLDocument | Table, name: str, value: Any) -> None:
    """Add a value in the first way of writing it that reads back the same."""
    if isinstance(value, str):
        parent.add(name, _text(value))
        return
    if not isinstance(value, dict | list):
        parent.add(name, value)
        return
    if _survives(lambda: tomlkit.item(_lined(value)), value):
        parent.add(name, tomlkit.item(_lined(value)))
    else:
        text = json.dumps(value, ensure_ascii=False, sort_keys=True)
        parent.add(name + JSON_SUFFIX, _text(text))


def _lined(value: Any) -> Any:
    """Return a value whose texts of several lines will be written on them, keys in order."""
    if isinstance(value, dict):
        return {key: _lined(each) for key, each in sorted(value.items())}
    if isinstance(value, list):
        return [_lined(each) for each in value]
    return _text(value) if isinstance(value, str) else value


def _text(text: str) -> Item:
    """Return a text on several lines where it has some and can be read back so."""
    if "\n" in text:
        for made in (
            # The line end behind the opening quotes is none of the text's.
            partial(String, StringType.MLL, text, "\n" + text, Trivia()),
            partial(tomlkit.string, text, multiline=True),
        ):
            if _survives(made, text):
                return made()
    return tomlkit.string(text)


def _survives(make: Callable[[], Item], expected: Any) -> bool:
    """Tell whether what is made reads back as expected, types included."""
    try:
        document = tomlkit.document()
        document.add("value", make())
        found = tomllib.loads(tomlkit.dumps(document))["value"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return False
    return json.dumps(found, sort_keys=True, default=repr) == json.dumps(expected, sort_keys=True)
