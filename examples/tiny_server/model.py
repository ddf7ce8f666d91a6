"""The forward pass of a Llama-shaped model over several sequences at once."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from examples.tiny_server.weights import Array, ModelConfig, Weights

Ids = NDArray[np.int64]


class KeyValueCache:
    """Keep the keys and values of one sequence: [layer, kv head, position, head size].

    `ids` are the tokens whose keys and values are there. Only caches of one `scope`, which is
    the weights' epoch and the requests' salt, may be copied into one another.
    """

    def __init__(self, config: ModelConfig, capacity: int) -> None:
        self._config = config
        shape = (config.layers, config.kv_heads, capacity, config.head_size)
        self.keys: Array = np.empty(shape, dtype=np.float32)
        self.values: Array = np.empty(shape, dtype=np.float32)
        self.capacity = capacity
        self.length = 0
        self.scope: tuple[int, str] = (0, "")
        self._ids: Ids = np.empty(capacity, dtype=np.int64)

    @property
    def ids(self) -> Ids:
        """Return the tokens held, as a view."""
        return self._ids[: self.length]

    def append_ids(self, ids: Ids) -> None:
        """Count tokens in whose keys and values a forward pass has just written."""
        self._ids[self.length : self.length + len(ids)] = ids
        self.length += len(ids)

    def copy_from(self, other: "KeyValueCache", length: int) -> None:
        """Take over the first `length` positions of another cache that saw the same tokens."""
        span = slice(self.length, length)
        self.keys[:, :, span] = other.keys[:, :, span]
        self.values[:, :, span] = other.values[:, :, span]
        self._ids[span] = other._ids[span]
        self.length = length

    def trimmed(self) -> "KeyValueCache":
        """Return a cache with no spare room: itself, or a copy."""
        if self.length == self.capacity:
            return self
        copy = KeyValueCache(self._config, self.length)
        copy.copy_from(self, self.length)
        copy.scope = self.scope
        return copy


@dataclass(frozen=True, slots=True)
class Chunk:
    """Ask for `ids` to be run after what `cache` holds."""

    cache: KeyValueCache
    ids: Ids


class Model:
    """Run the model. One thread at a time. The weights never change: new ones, a new model."""

    def __init__(self, weights: Weights) -> None:
        self.config = weights.config
        self.weights = weights
        self._cos, self._sin = _rotations(weights.config)

    def forward(self, chunks: Sequence[Chunk]) -> Array:
        """Run all chunks in one pass and return logits [chunk, vocabulary] after each one's last.

        The caches grow by their chunk. All tokens share the large matrix products; only
        attention goes sequence by sequence.
        """
        hidden = self._hidden(chunks)
        ends = np.cumsum([len(chunk.ids) for chunk in chunks]) - 1
        return self._logits(hidden[ends])

    def logits_everywhere(self, ids: Sequence[int]) -> Array:
        """Return logits [position, vocabulary] of one fresh pass over `ids`, for comparison."""
        array = np.asarray(ids, dtype=np.int64)
        cache = KeyValueCache(self.config, len(array))
        return self._logits(self._hidden([Chunk(cache, array)]))

    def _logits(self, hidden: Array) -> Array:
        normed = _rms_norm(hidden, self.weights.output_norm, self.config.norm_epsilon)
        return np.asarray(normed @ self.weights.embedding.T)

    def _hidden(self, chunks: Sequence[Chunk]) -> Array:
        config = self.config
        lengths = [len(chunk.ids) for chunk in chunks]
        bounds = [0, *np.cumsum(lengths).tolist()]
        ids = np.concatenate([chunk.ids for chunk in chunks])
        positions = np.concatenate(
            [np.arange(c.cache.length, c.cache.length + len(c.ids)) for c in chunks]
        )
        cos, sin = self._cos[positions, None], self._sin[positions, None]
        masks = [_causal_mask(chunk.cache.length, len(chunk.ids)) for chunk in chunks]
        query_size = config.heads * config.head_size
        rotated_heads = config.heads + config.kv_heads
        hidden = self.weights.embedding[ids]
        for number, layer in enumerate(self.weights.layers):
            normed = _rms_norm(hidden, layer.attention_norm, config.norm_epsilon)
            stacked = (normed @ layer.qkv.T).reshape(len(ids), -1, config.head_size)
            rotated = _rotate(stacked[:, :rotated_heads], cos, sin)
            value = stacked[:, rotated_heads:]
            mixed = np.empty((len(ids), query_size), dtype=np.float32)
            for chunk, mask, start, end in zip(chunks, masks, bounds, bounds[1:], strict=False):
                mixed[start:end] = _attend(
                    rotated[start:end], value[start:end], chunk.cache, number, mask, config
                )
            hidden = hidden + mixed @ layer.attention_output.T
            normed = _rms_norm(hidden, layer.feed_forward_norm, config.norm_epsilon)
            gate_up = normed @ layer.gate_up.T
            gate, up = gate_up[:, : config.feed_forward], gate_up[:, config.feed_forward :]
            hidden = hidden + (_silu(gate) * up) @ layer.down.T
        for chunk in chunks:
            chunk.cache.append_ids(chunk.ids)
        return np.asarray(hidden)


def _attend(
    rotated: Array,
    value: Array,
    cache: KeyValueCache,
    number: int,
    mask: Array | None,
    config: ModelConfig,
) -> Array:
    count = len(rotated)
    start, end = cache.length, cache.length + count
    cache.keys[number, :, start:end] = rotated[:, config.heads :].transpose(1, 0, 2)
    cache.values[number, :, start:end] = value.transpose(1, 0, 2)
    keys, values = cache.keys[number, :, :end], cache.values[number, :, :end]
    shared = config.heads // config.kv_heads
    # [kv head, query head of it * token, head size]: grouped queries share one product.
    grouped = rotated[:, : config.heads].reshape(count, config.kv_heads, shared, config.head_size)
    query = grouped.transpose(1, 2, 0, 3).reshape(config.kv_heads, shared * count, -1)
    scores = query @ keys.transpose(0, 2, 1)
    scores *= np.float32(config.head_size**-0.5)
    if mask is not None:
        scores.reshape(config.kv_heads, shared, count, end)[...] += mask
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
    mixed = (scores @ values).reshape(config.kv_heads, shared, count, config.head_size)
    return np.asarray(mixed.transpose(2, 0, 1, 3).reshape(count, -1))


def _causal_mask(before: int, count: int) -> Array | None:
    if count == 1:
        return None
    mask = np.zeros((count, before + count), dtype=np.float32)
    mask[:, before:][np.triu_indices(count, 1)] = -np.inf
    return mask


def _rms_norm(values: Array, weight: Array, epsilon: float) -> Array:
    scale = np.sqrt(np.mean(values * values, axis=-1, keepdims=True) + np.float32(epsilon))
    return np.asarray(values / scale * weight)


def _silu(values: Array) -> Array:
    # exp overflows to inf for very negative values, and then value/inf is the right 0.
    with np.errstate(over="ignore"):
        return np.asarray(values / (1.0 + np.exp(-values)))


def _rotations(config: ModelConfig) -> tuple[Array, Array]:
    half = config.head_size // 2
    frequencies = config.rope_base ** (-np.arange(half, dtype=np.float64) / half)
    angles = np.outer(np.arange(config.context_length), frequencies)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def _rotate(heads: Array, cos: Array, sin: Array) -> Array:
    """Rotate neighbouring pairs: GGUF's llama layout interleaves them."""
    even, odd = heads[..., 0::2], heads[..., 1::2]
    rotated = np.empty_like(heads)
    rotated[..., 0::2] = even * cos - odd * sin
    rotated[..., 1::2] = even * sin + odd * cos
    return rotated
