"""Read the metadata of a GGUF file in a fraction of a second; `gguf` itself takes 20 for these.

Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import struct
from pathlib import Path
from typing import Any

_FORMS = ["<B", "<b", "<H", "<h", "<I", "<i", "<f", "<?", "", "", "<Q", "<q", "<d"]
_STRING, _ARRAY = 8, 9


def read_metadata(path: Path) -> dict[str, Any]:
    """Return all keys of a little-endian GGUF file of version 3."""
    data = path.read_bytes()
    magic, version, _, count = struct.unpack_from("<4sIQQ", data)
    if (magic, version) != (b"GGUF", 3):
        raise ValueError(f"{path} is no GGUF file of version 3")
    position = 24
    found: dict[str, Any] = {}
    for _ in range(count):
        key, position = _string(data, position)
        (kind,) = struct.unpack_from("<I", data, position)
        found[key], position = _value(data, position + 4, kind)
    return found


def _string(data: bytes, position: int) -> tuple[str, int]:
    (length,) = struct.unpack_from("<Q", data, position)
    end = position + 8 + length
    return data[position + 8 : end].decode("utf-8"), end


def _value(data: bytes, position: int, kind: int) -> tuple[Any, int]:
    if kind == _STRING:
        return _string(data, position)
    if kind != _ARRAY:
        (value,) = struct.unpack_from(_FORMS[kind], data, position)
        return value, position + struct.calcsize(_FORMS[kind])
    inner, length = struct.unpack_from("<IQ", data, position)
    position += 12
    values = []
    for _ in range(length):
        value, position = _value(data, position, inner)
        values.append(value)
    return values, position
