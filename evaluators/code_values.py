"""Carry Python's plain values over a pipe as JSON that keeps their kinds apart.

Used on both sides: it is put into sandboxes with `code_runner`, in the syntax of Python 3.6.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

MOST_DEPTH = 60


def pack(value: "Any", depth: int = 0) -> "Any":
    """Return plain data as JSON that keeps Python's kinds apart; other objects by their repr."""
    if depth > MOST_DEPTH:
        return {"repr": "too deep"}
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value) if -(2**63) < value < 2**63 else {"int": hex(value)}
    if isinstance(value, float):
        return {"float": repr(float(value))}
    if isinstance(value, complex):
        return {"complex": [repr(value.real), repr(value.imag)]}
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": bytes(value).hex()}
    if isinstance(value, dict):
        pairs = [[pack(key, depth + 1), pack(each, depth + 1)] for key, each in value.items()]
        return {"dict": pairs}
    for kind, name in ((tuple, "tuple"), (set, "set"), (frozenset, "frozenset")):
        if isinstance(value, kind):
            return {name: [pack(each, depth + 1) for each in value]}
    if isinstance(value, list) or hasattr(type(value), "__iter__"):
        return [pack(each, depth + 1) for each in value]
    return {"repr": repr(value)[:200]}


def unpack(value: "Any") -> "Any":
    """Return what `pack` made JSON of; raise ValueError for what it never makes."""
    if isinstance(value, list):
        return [unpack(each) for each in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1:
        raise ValueError("no packed value")
    ((kind, inner),) = value.items()
    makers: dict[str, Callable[[Any], Any]] = {
        "int": lambda text: int(text, 16),
        "float": float,
        "complex": lambda parts: complex(float(parts[0]), float(parts[1])),
        "bytes": bytes.fromhex,
        "dict": lambda pairs: {unpack(key): unpack(each) for key, each in pairs},
        "tuple": lambda items: tuple(unpack(each) for each in items),
        "set": lambda items: {unpack(each) for each in items},
        "frozenset": lambda items: frozenset(unpack(each) for each in items),
        "repr": Unreadable,
    }
    if kind not in makers:
        raise ValueError("no packed value")
    try:
        return makers[kind](inner)
    except (TypeError, AttributeError, LookupError, OverflowError) as fault:
        raise ValueError("no packed value") from fault


class Unreadable:
    """Stand for an object that is no plain data; it equals nothing."""

    def __init__(self, text: str) -> None:
        self.text = str(text)[:200]

    def __repr__(self) -> str:
        return self.text
