"""Find the adapter for a kind of inference server."""

from collections.abc import Iterator, Mapping

from rollouts.inference.exceptions import UnknownServerKind
from rollouts.inference.protocol import ServerAdapter
from rollouts.inference.vllm import VllmAdapter


class AdapterRegistry(Mapping[str, ServerAdapter]):
    """Map kinds to adapters; asking for an unknown kind raises UnknownServerKind."""

    def __init__(self, adapters: Mapping[str, ServerAdapter]) -> None:
        self._adapters = dict(adapters)

    def __getitem__(self, kind: str) -> ServerAdapter:
        try:
            return self._adapters[kind]
        except KeyError:
            known = ", ".join(sorted(self._adapters)) or "none"
            raise UnknownServerKind(
                f"no adapter speaks to servers of kind {kind!r}; known kinds: {known}"
            ) from None

    def __contains__(self, kind: object) -> bool:
        return kind in self._adapters

    def __iter__(self) -> Iterator[str]:
        return iter(self._adapters)

    def __len__(self) -> int:
        return len(self._adapters)


def default_adapters() -> AdapterRegistry:
    """Return a new registry of every kind that the service speaks. Keep one per process."""
    return AdapterRegistry({"vllm": VllmAdapter()})
