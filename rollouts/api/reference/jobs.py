"""A reference instance as a task: the texts that the settings take from it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from rollouts.api.reference.surface import INSTRUCTION_PATHS, DataSource
from rollouts.exceptions import InvalidValue
from rollouts.services.inline import InlineTask

_STEP = re.compile(r"\.?([^.\[\]]+)|\[(\d+)\]")
_MISSING = object()


def instance_id_of(instance: Mapping[str, Any]) -> str:
    """Return the instance's id; one without gets what the reference makes up for it."""
    given = instance.get("instance_id")
    if given is not None:
        return str(given)
    extra = instance.get("extra_info")
    extra = extra if isinstance(extra, Mapping) else {}
    parts = [instance.get("data_source", "unknown")]
    parts += [extra.get(name, "unknown") for name in ("name", "split", "index")]
    return "_".join(map(str, parts))


def inline_task(instance: Mapping[str, Any], source: DataSource) -> InlineTask:
    """Return the task that an instance of a data source is. Raises InvalidValue."""
    return InlineTask(
        environment=source.environment,
        instruction=_instruction(instance, source),
        payload=_filled(source.payload, instance),
        hidden=_filled(source.hidden, instance),
        metadata={"instance_id": instance_id_of(instance)},
    )


def _instruction(instance: Mapping[str, Any], source: DataSource) -> str:
    if source.instruction:
        found = _filled(source.instruction, instance)
    else:
        tried = (look_up(instance, path) for path in INSTRUCTION_PATHS)
        found = next((text for text in tried if isinstance(text, str)), None)
    if not isinstance(found, str) or not found:
        raise InvalidValue(
            "The instance holds no instruction: "
            + (f"there is no text at {source.instruction}." if source.instruction else _TRIED)
        )
    return found


_TRIED = f"looked for {', '.join(INSTRUCTION_PATHS)}."


def _filled(template: Any, instance: Mapping[str, Any]) -> Any:
    """Return a template with each `$.path` replaced by what the instance has there."""
    match template:
        case str() if template.startswith("$."):
            found = look_up(instance, template)
            if found is _MISSING:
                raise InvalidValue(f"The instance has nothing at {template}.")
            return found
        case list():
            return [_filled(each, instance) for each in template]
        case Mapping():
            return {name: _filled(each, instance) for name, each in template.items()}
    return template


def look_up(instance: Mapping[str, Any], path: str) -> Any:
    """Return what is at a path such as `$.prompt[0].content`, or a mark that nothing is.

    A text on the way is read as JSON, as the reference does with its prompts.
    """
    value: Any = instance
    for name, index in _STEP.findall(path.removeprefix("$")):
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except ValueError:
                return _MISSING
        if index and isinstance(value, list) and int(index) < len(value):
            value = value[int(index)]
        elif name and isinstance(value, Mapping) and name in value:
            value = value[name]
        else:
            return _MISSING
    return value
