"""The order of an epoch: which tasks come, how often, and when; pure, the same for the same seed.

A task set's weight says how often each of its tasks comes in an epoch: 2 is twice, 0.5 is every
other epoch. Its draws are spread evenly over the epoch, so that every stretch of it has the sets
in proportion. Randomness: the raw 64 bits of NumPy's PCG64, seeded by SeedSequence. They are kept
the same over NumPy's releases, which its `permutation` is not: https://numpy.org/neps/nep-0019.html
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt

ID_BYTES = 16
Places = npt.NDArray[np.int64]


@dataclass(frozen=True)
class SetTasks:
    """A task set's tasks that may be drawn: 16 bytes each, in a fixed order."""

    name: str
    ids: bytes
    weight: float = 1.0

    @property
    def count(self) -> int:
        """Return how many tasks there are."""
        return len(self.ids) // ID_BYTES


def order_of(sets: Sequence[SetTasks], *, seed: int, epoch: int, shuffle: bool) -> bytes:
    """Return the ids of an epoch's draws in order, 16 bytes each."""
    ids: list[npt.NDArray[np.uint8]] = []
    places: list[npt.NDArray[np.float64]] = []
    for each in sorted(sets, key=lambda one: one.name):
        drawn = _drawn(each, seed=seed, epoch=epoch, shuffle=shuffle)
        if len(drawn):
            table = np.frombuffer(each.ids, dtype=np.uint8).reshape(-1, ID_BYTES)
            ids.append(table[drawn])
            places.append(_spread(each, len(drawn), seed=seed, epoch=epoch, shuffle=shuffle))
    if not ids:
        return b""
    order = np.argsort(np.concatenate(places), kind="stable")
    return np.concatenate(ids)[order].tobytes()


def _drawn(each: SetTasks, *, seed: int, epoch: int, shuffle: bool) -> Places:
    """Return which of a set's tasks come in this epoch, in order.

    They are one stretch of an endless row of passes through the set, each in an order of its own,
    so that a weight of 0.5 leaves no task out for good.
    """
    count = each.count
    weight = Fraction(each.weight).limit_denominator(1000)
    start, end = (int(count * weight * number) for number in (epoch, epoch + 1))
    if start == end:
        return np.empty(0, dtype=np.int64)
    passes = [
        np.argsort(_raw(count, seed, number, f"pass/{each.name}"), kind="stable")
        if shuffle
        else np.arange(count)
        for number in range(start // count, (end - 1) // count + 1)
    ]
    first = start % count
    return np.concatenate(passes)[first : first + end - start]


def _spread(
    each: SetTasks, draws: int, *, seed: int, epoch: int, shuffle: bool
) -> npt.NDArray[np.float64]:
    """Return rising places in 0..1, one in each of `draws` equal parts."""
    within = np.full(draws, 0.5)
    if shuffle:
        within = (_raw(draws, seed, epoch, f"place/{each.name}") >> 11) / 2**53
    places: npt.NDArray[np.float64] = (np.arange(draws) + within) / draws
    return places


def _raw(count: int, seed: int, number: int, use: str) -> npt.NDArray[np.uint64]:
    """Return 64-bit numbers of a stream of its own: adding a set leaves the others' order."""
    digest = hashlib.sha256(use.encode()).digest()
    words = [seed, number, int.from_bytes(digest[:8], "big")]
    bits: npt.NDArray[np.uint64] = np.random.PCG64(np.random.SeedSequence(words)).random_raw(count)
    return bits
