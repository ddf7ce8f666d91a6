"""Name the model's tensors as its file does, and replace some of them."""

import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from examples.tiny_server.weights import Array, Layer, ModelConfig, Weights

# The whole model is 540 MB; twice that bounds what a compressed file may unpack to.
MAX_FILE_BYTES = 1_100_000_000

Place = tuple[int | None, str, slice]
"""A layer (None for the model itself), a field of it, and the rows of that field."""


class TensorError(ValueError):
    """Say what is wrong with tensors that shall become weights."""


def tensor_places(config: ModelConfig) -> dict[str, Place]:
    """Return where each tensor of the file lies: some share an array with others."""
    query = config.heads * config.head_size
    key = config.kv_heads * config.head_size
    whole = slice(None)
    rows = {
        "attn_norm": ("attention_norm", whole),
        "attn_q": ("qkv", slice(0, query)),
        "attn_k": ("qkv", slice(query, query + key)),
        "attn_v": ("qkv", slice(query + key, query + 2 * key)),
        "attn_output": ("attention_output", whole),
        "ffn_norm": ("feed_forward_norm", whole),
        "ffn_gate": ("gate_up", slice(0, config.feed_forward)),
        "ffn_up": ("gate_up", slice(config.feed_forward, 2 * config.feed_forward)),
        "ffn_down": ("down", whole),
    }
    places: dict[str, Place] = {
        "token_embd.weight": (None, "embedding", whole),
        "output_norm.weight": (None, "output_norm", whole),
    }
    for number in range(config.layers):
        for name, (field, span) in rows.items():
            places[f"blk.{number}.{name}.weight"] = (number, field, span)
    return places


def named_tensors(weights: Weights) -> dict[str, Array]:
    """Return every tensor by its name, as views."""
    return {
        name: getattr(_holder(weights, number), field)[span]
        for name, (number, field, span) in tensor_places(weights.config).items()
    }


def replaced(weights: Weights, tensors: Mapping[str, Array]) -> Weights:
    """Return weights with these tensors in place of their own; raise TensorError.

    What is not named stays shared with `weights`, which do not change.
    """
    places = tensor_places(weights.config)
    changed: dict[int | None, dict[str, Array]] = {}
    for name, tensor in tensors.items():
        if name not in places:
            raise TensorError(f"the model has no tensor {name!r}")
        number, field, span = places[name]
        fields = changed.setdefault(number, {})
        if field not in fields:
            fields[field] = getattr(_holder(weights, number), field).copy()
        target = fields[field][span]
        if tensor.shape != target.shape:
            raise TensorError(f"{name} has shape {list(tensor.shape)}, not {list(target.shape)}")
        if tensor.dtype.kind != "f" or not np.isfinite(tensor).all():
            raise TensorError(f"{name} must hold finite floating-point numbers")
        target[...] = tensor
    layers = tuple(
        replace(layer, **changed.get(number, {})) for number, layer in enumerate(weights.layers)
    )
    whole = changed.get(None, {})
    return Weights(
        config=weights.config,
        embedding=whole.get("embedding", weights.embedding),
        layers=layers,
        output_norm=whole.get("output_norm", weights.output_norm),
    )


def read_tensors(path: Path) -> dict[str, Array]:
    """Return the tensors in an .npz or .safetensors file; raise TensorError."""
    if path.suffix not in (".npz", ".safetensors"):
        raise TensorError(f"{path.name} is neither .npz nor .safetensors")
    try:
        tensors = _read_npz(path) if path.suffix == ".npz" else _read_safetensors(path)
    except TensorError:
        raise
    # Both formats fail in their readers' own ways on a file that is cut or no such file.
    except Exception as error:
        raise TensorError(f"{path.name} cannot be read: {error}") from error
    if not tensors:
        raise TensorError(f"{path.name} holds no tensor")
    return tensors


def _read_npz(path: Path) -> dict[str, Array]:
    with zipfile.ZipFile(path) as archive:
        size = sum(entry.file_size for entry in archive.infolist())
    _check_size(path, size)
    with np.load(path, allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}


def _read_safetensors(path: Path) -> dict[str, Array]:
    _check_size(path, path.stat().st_size)
    try:
        from safetensors.numpy import load_file
    except ImportError as error:
        raise TensorError(".safetensors needs the package safetensors; use .npz") from error
    loaded: dict[str, Any] = load_file(path)
    return loaded


def _check_size(path: Path, size: int) -> None:
    if size > MAX_FILE_BYTES:
        raise TensorError(f"{path.name} holds {size} bytes, more than {MAX_FILE_BYTES}")


def _holder(weights: Weights, number: int | None) -> Weights | Layer:
    return weights if number is None else weights.layers[number]
