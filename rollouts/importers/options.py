"""What the one who imports may say about rows that do not say it themselves."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

from evaluators.base import EvaluatorFault
from evaluators.registry import get_evaluator

TASK_FIELDS = (
    *("ref", "instruction", "answer", "evaluator", "evaluator_settings", "evaluator_payload"),
    *("messages", "metadata", "image", "workdir"),
)
TOOLS = ("refuse", "environment")


class InvalidOptions(ValueError):
    """Say which option of an import is wrong and what it should be."""

    code: ClassVar[str] = "import.options_invalid"


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """Hold how rows are read.

    `evaluator` and `evaluator_settings` are for rows that name none. `mapping` says which column
    (`a.b` goes into an object) holds which field of a task. `data_sources` names the evaluator,
    and its `settings`, for verl's data sources. `verifier` is the resources server that NeMo
    Gym's rows are for. `image` is where SWE rows that name none run (`{instance_id}` and other
    columns are filled in), `workdir` where their repository lies, `test_cmd` how its tests run,
    `log_parser` who reads their log. `tools` says what becomes of rows that bring tools: they are
    refused, or the environment's own tools stand in for them.
    """

    evaluator: str = ""
    evaluator_settings: Mapping[str, Any] = field(default_factory=dict)
    mapping: Mapping[str, str] = field(default_factory=dict)
    data_sources: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    verifier: str = ""
    image: str = ""
    workdir: str = ""
    test_cmd: str = ""
    log_parser: str = ""
    tools: str = "refuse"

    def as_dict(self) -> dict[str, Any]:
        """Return the options as JSON, without those that are not set."""
        default = asdict(type(self)())
        return {name: value for name, value in asdict(self).items() if value != default[name]}

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> ReadOptions:
        """Check options that came as JSON or TOML; raise `InvalidOptions`."""
        known = {each.name: each for each in fields(cls)}
        for name, value in given.items():
            if name not in known:
                raise InvalidOptions(f"unknown option {name!r}; known: {', '.join(known)}")
            wanted = str if known[name].type == "str" else Mapping
            if not isinstance(value, wanted):
                kind = "a text" if wanted is str else "a table"
                raise InvalidOptions(f"option {name!r} is {value!r}; it must be {kind}")
        options = cls(**given)
        options._check()
        return options

    def _check(self) -> None:
        for name, column in self.mapping.items():
            if name not in TASK_FIELDS or not isinstance(column, str) or not column:
                raise InvalidOptions(
                    f"mapping {name!r} = {column!r}: map one of {', '.join(TASK_FIELDS)} to the "
                    "name of a column"
                )
        for source, rule in self.data_sources.items():
            if not isinstance(rule, Mapping) or not isinstance(rule.get("evaluator"), str):
                raise InvalidOptions(
                    f"data_sources {source!r} needs an 'evaluator', and may have 'settings'"
                )
            if set(rule) - {"evaluator", "settings"} or not isinstance(
                rule.get("settings", {}), Mapping
            ):
                raise InvalidOptions(f"data_sources {source!r} has 'evaluator' and 'settings' only")
        if self.tools not in TOOLS:
            raise InvalidOptions(f"option 'tools' is {self.tools!r}; choose {' or '.join(TOOLS)}")
        named = [rule["evaluator"] for rule in self.data_sources.values()]
        try:
            for name in filter(None, [self.evaluator, *named]):
                get_evaluator(name)
        except EvaluatorFault as fault:
            raise InvalidOptions(str(fault)) from fault


def read_option_file(path: Path) -> dict[str, Any]:
    """Return the options in a TOML file, unchecked; raise `InvalidOptions` or OSError."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as fault:
        raise InvalidOptions(f"{path} is not TOML: {fault}") from fault
