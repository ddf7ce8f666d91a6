"""Choose the next token from logits, and say its log-probability."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from examples.tiny_server.weights import Array


@dataclass(frozen=True, slots=True)
class Sampling:
    """Say how one request samples. `temperature` 0 is greedy; `top_k` 0 is the whole vocabulary."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0


@dataclass(frozen=True, slots=True)
class Choice:
    """Hold the sampled token and the likeliest one, each with its log-probability."""

    token: int
    logprob: float
    top_token: int
    top_logprob: float


def log_softmax(logits: Array) -> Array:
    """Return the log-probabilities of logits along the last axis."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))


def sample(
    logits: Array, sampling: Sampling, random: np.random.Generator, *, raw: bool = False
) -> Choice:
    """Choose a token, given logits [vocabulary].

    Log-probabilities are of the full vocabulary after temperature (before it, when `raw`) and
    before top-k and top-p; greedy sampling gives those of temperature 1.
    """
    greedy = sampling.temperature == 0.0
    logprobs = log_softmax(logits if greedy else logits / np.float32(sampling.temperature))
    top = int(logprobs.argmax())
    token = top if greedy else _draw(logprobs, sampling, random)
    if raw and sampling.temperature not in (0.0, 1.0):
        logprobs = log_softmax(logits)
    return Choice(token, float(logprobs[token]), top, float(logprobs[top]))


def _draw(logprobs: Array, sampling: Sampling, random: np.random.Generator) -> int:
    allowed = _allowed(logprobs, sampling)
    weights = np.exp(logprobs if allowed is None else logprobs[allowed], dtype=np.float64)
    cumulative = np.cumsum(weights)
    place = int(np.searchsorted(cumulative, random.random() * cumulative[-1], side="right"))
    place = min(place, len(cumulative) - 1)
    return place if allowed is None else int(allowed[place])


def _allowed(logprobs: Array, sampling: Sampling) -> NDArray[np.int64] | None:
    """Return the tokens that top-k, then top-p of what it left, keep; None for all of them."""
    limited = 0 < sampling.top_k < logprobs.size
    if not limited and sampling.top_p >= 1.0:
        return None
    if limited:
        order = _likeliest(logprobs, sampling.top_k)
        total = np.exp(logprobs[order], dtype=np.float64).sum()
    else:
        # The nucleus is nearly always inside the first thousand: a full sort takes 5 ms.
        order, total = _likeliest(logprobs, min(1024, logprobs.size)), 1.0
        if np.exp(logprobs[order], dtype=np.float64).sum() < sampling.top_p:
            order = _likeliest(logprobs, logprobs.size)
    if sampling.top_p < 1.0:
        probabilities = np.exp(logprobs[order], dtype=np.float64) / total
        before = np.cumsum(probabilities) - probabilities
        order = order[before < sampling.top_p]
    return order


def _likeliest(logprobs: Array, count: int) -> NDArray[np.int64]:
    """Return the `count` likeliest tokens, likeliest first."""
    if count < logprobs.size:
        chosen = np.argpartition(-logprobs, count - 1)[:count]
    else:
        chosen = np.arange(logprobs.size)
    return np.asarray(chosen[np.argsort(-logprobs[chosen], kind="stable")])
