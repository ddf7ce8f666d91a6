"""What crosses the line between rollouts and inference servers."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol

FinishReason = Literal["stop", "length"]
Cancelled = Callable[[], bool]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Say how to sample. `top_k` None means the whole vocabulary; `temperature` 0 is greedy."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    max_tokens: int = 256
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature <= 100.0:
            raise ValueError(f"temperature must be between 0 and 100, not {self.temperature}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be above 0 and at most 1, not {self.top_p}")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k must be at least 1 or None, not {self.top_k}")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, not {self.max_tokens}")

    def as_dict(self) -> dict[str, Any]:
        """Return the parameters as JSON-ready values."""
        return {**asdict(self), "stop_token_ids": list(self.stop_token_ids)}


@dataclass(frozen=True, slots=True)
class Server:
    """Name one inference server. `max_model_len` is in tokens, None when not known."""

    id: str
    url: str
    kind: str
    model: str
    max_in_flight: int = 16
    max_model_len: int | None = None


@dataclass(frozen=True, slots=True)
class Generation:
    """Hold one sampled turn: ids and log-probabilities of equal length, the stop token included.

    `policy_version` is what the server itself said, None when it does not tell; `seconds` is
    the time of the successful request; `logprob_mode` is the server's word for what its
    log-probabilities are of, None when it does not tell.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    policy_version: int | None
    server_id: str
    seconds: float
    logprob_mode: str | None = None


@dataclass(frozen=True, slots=True)
class Health:
    """Say whether a server answers and what it serves; `detail` is a sentence for people."""

    ok: bool
    detail: str
    model: str | None = None
    policy_version: int | None = None
    max_model_len: int | None = None


class ServerAdapter(Protocol):
    """Speak one kind of server's HTTP. Thread-safe."""

    def generate(
        self,
        server: Server,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        timeout_seconds: float,
        cancelled: Cancelled | None = None,
    ) -> Generation:
        """Sample one turn; raise an InferenceFault. `cancelled` is polled while waiting."""
        ...

    def health(self, server: Server, *, timeout_seconds: float) -> Health:
        """Ask the server how it is; never raise for what is wrong with the server."""
        ...
