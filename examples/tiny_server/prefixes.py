"""Remember what finished sequences computed, so that the next turn need not compute it again."""

from collections.abc import Iterable

import numpy as np

from examples.tiny_server.model import Ids, KeyValueCache


class PrefixMemory:
    """Keep caches of finished sequences, least recently used out first. `tokens` is their size."""

    def __init__(self) -> None:
        self._kept: list[KeyValueCache] = []

    @property
    def tokens(self) -> int:
        """Return the positions that the kept caches occupy."""
        return sum(cache.capacity for cache in self._kept)

    def keep(self, cache: KeyValueCache) -> None:
        """Keep a finished cache, in place of those it extends."""
        self._kept = [
            old
            for old in self._kept
            if old.scope != cache.scope or _common(old, cache.ids) < old.length
        ]
        if cache.length:
            self._kept.append(cache.trimmed())

    def forget_oldest(self) -> bool:
        """Drop one cache; say whether there was one."""
        if not self._kept:
            return False
        self._kept.pop(0)
        return True

    def fill(self, cache: KeyValueCache, prompt: Ids, running: Iterable[KeyValueCache]) -> int:
        """Copy into `cache` the longest prefix of `prompt` that a cache of its scope has.

        Returns how many tokens that spared. The last token of the prompt is always left to
        compute: its logits are needed.
        """
        best, before = None, cache.length
        length = before
        for other in [*self._kept, *running]:
            if other.scope != cache.scope:
                continue
            common = min(_common(other, prompt), len(prompt) - 1)
            if common > length:
                best, length = other, common
        if best is None:
            return 0
        cache.copy_from(best, length)
        if best in self._kept:
            self._kept.remove(best)
            self._kept.append(best)
        return length - before


def _common(cache: KeyValueCache, ids: Ids) -> int:
    """Return how many leading tokens a cache and a prompt share."""
    length = min(cache.length, len(ids))
    different = np.flatnonzero(cache.ids[:length] != ids[:length])
    return int(different[0]) if len(different) else length
