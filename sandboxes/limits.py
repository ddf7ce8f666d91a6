"""The limits that an environment may set, and what is wrong with a set of them."""

from collections.abc import Iterator
from typing import Any

LIMITS = ("memory_bytes", "cpus", "processes", "disk_bytes", "output_bytes", "lifetime_seconds")
FRACTIONAL = ("cpus",)


def limit_errors(limits: Any) -> Iterator[str]:
    """Yield a sentence for everything that no node could keep."""
    if not isinstance(limits, dict):
        yield "It must be a JSON object."
        return
    for name, value in limits.items():
        if name not in LIMITS:
            yield f"Unknown limit {name!r}; known: {', '.join(LIMITS)}."
        elif name in FRACTIONAL:
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e6:
                yield f"{name} must be a number above 0, not {value!r}."
        elif type(value) is not int or value < 1:
            yield f"{name} must be a whole number above 0, not {value!r}."
