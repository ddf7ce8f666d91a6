"""Typed reading of the environment: one place, one sentence for what is missing or wrong."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path


class SettingError(Exception):
    """A setting is missing or malformed; the message says what to set."""


def read_env_file(path: Path) -> dict[str, str]:
    """Return the NAME=value lines of ``path``; an absent file is empty."""
    values: dict[str, str] = {}
    if not path.is_file():
        return values
    for line in path.read_text().splitlines():
        name, separator, value = line.partition("=")
        if separator and not name.lstrip().startswith("#"):
            values[name.strip()] = value.strip()
    return values


class Env:
    """Read typed values by name and remember every name that was asked for."""

    def __init__(self, values: Mapping[str, str]) -> None:
        self._values = values
        self.known: set[str] = set()

    def text(self, name: str, default: str | None = None) -> str:
        """Return the value as text; without a default the setting is required."""
        self.known.add(name)
        value = self._values.get(name, "")
        if value:
            return value
        if default is None:
            raise SettingError(
                f"{name} is not set. Set it in the environment or in var/stack.env "
                f"(`make up` and `make demo` write that file); see the README's settings table."
            )
        return default

    def integer(self, name: str, default: int, *, minimum: int = 0) -> int:
        """Return the value as an integer of at least ``minimum``."""
        return int(self._number(name, default, minimum, int))

    def seconds(self, name: str, default: float, *, minimum: float = 0.0) -> float:
        """Return the value as a duration in seconds of at least ``minimum``."""
        return self._number(name, default, minimum, float)

    def _number(
        self, name: str, default: float, minimum: float, parse: Callable[[str], float]
    ) -> float:
        raw = self.text(name, str(default))
        try:
            value = parse(raw)
        except ValueError:
            raise SettingError(
                f"{name} is {raw!r}, not a number; write one like {default}."
            ) from None
        if not value >= minimum:
            raise SettingError(f"{name} is {raw}; it must be at least {minimum}.")
        return value

    def boolean(self, name: str, default: bool) -> bool:
        """Return the value as a boolean: 1, true, yes, on or 0, false, no, off."""
        raw = self.text(name, "1" if default else "0").lower()
        if raw in {"1", "true", "yes", "on"}:
            return True
        if raw in {"0", "false", "no", "off"}:
            return False
        raise SettingError(f"{name} is {raw!r}; write 1 or 0.")

    def words(self, name: str, default: str = "") -> list[str]:
        """Return a comma-separated value as a list of words."""
        return [word.strip() for word in self.text(name, default).split(",") if word.strip()]

    def unknown(self, prefix: str) -> list[str]:
        """Return the names that start with ``prefix`` and were never asked for."""
        return sorted(n for n in self._values if n.startswith(prefix) and n not in self.known)


def load(env_file: Path) -> Env:
    """Return an Env over the process environment, with ``env_file`` for what it lacks."""
    return Env({**read_env_file(env_file), **os.environ})
