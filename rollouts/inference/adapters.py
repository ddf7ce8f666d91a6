"""Find the adapter for a kind of inference server."""

from collections.abc import Iterator, Mapping
from typing import cast

from rollouts.inference.exceptions import UnknownServerKind
from rollouts.inference.llama_cpp import LlamaCppAdapter
from rollouts.inference.openai_chat import OpenAIChatAdapter
from rollouts.inference.protocol import ChatAdapter, ServerAdapter, TokenAdapter
from rollouts.inference.sglang import SglangAdapter
from rollouts.inference.transport import Transport
from rollouts.inference.verl_generate import VerlGenerateAdapter
from rollouts.inference.vllm import VllmAdapter
from rollouts.inference.vllm_generate import VllmGenerateAdapter


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


def is_chat(adapter: ServerAdapter) -> bool:
    """Say whether an adapter speaks in messages, and so gives text alone."""
    return hasattr(adapter, "chat")


def as_token_adapter(adapter: ServerAdapter, kind: str) -> TokenAdapter:
    """Return an adapter as one that speaks in ids; raise UnknownServerKind when it does not."""
    if not hasattr(adapter, "generate"):
        raise UnknownServerKind(f"servers of kind {kind!r} give text alone, no token ids")
    return cast(TokenAdapter, adapter)


def as_chat_adapter(adapter: ServerAdapter, kind: str) -> ChatAdapter:
    """Return an adapter as one that speaks in messages; raise UnknownServerKind otherwise."""
    if not is_chat(adapter):
        raise UnknownServerKind(f"servers of kind {kind!r} are spoken to in token ids")
    return cast(ChatAdapter, adapter)


def default_adapters(
    *, transport: Transport | None = None, api_keys: Mapping[str, str] | None = None
) -> AdapterRegistry:
    """Return a new registry of every kind that the service speaks. Keep one per process.

    `api_keys` maps hosts to the keys that chat servers there want.
    """
    shared = transport or Transport()
    return AdapterRegistry(
        {
            "vllm": VllmAdapter(shared),
            "vllm_generate": VllmGenerateAdapter(shared),
            "sglang": SglangAdapter(shared),
            "verl_generate": VerlGenerateAdapter(shared),
            "llama_cpp": LlamaCppAdapter(shared),
            "openai": OpenAIChatAdapter(shared, api_keys=api_keys),
        }
    )
