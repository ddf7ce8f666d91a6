"""What crosses the line between rollouts and inference servers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol

from rollouts.inference.parsed import ParsedTurn

FinishReason = Literal["stop", "length", "abort"]
Cancelled = Callable[[], bool]
Message = Mapping[str, Any]
VersionRun = tuple[int, int]
"""A policy version, and how many tokens in a row it sampled."""


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
    """Name one inference server. `max_model_len` is in tokens, None when not known.

    Requests for servers of one `pool` wait in one queue. `logprob_mode` is what was found out of
    its log-probabilities, for answers that do not tell. Of one that is `held` nothing may be
    sampled, by health checks neither: its weights are being exchanged.
    """

    id: str
    url: str
    kind: str
    model: str
    max_in_flight: int = 16
    max_model_len: int | None = None
    pool: str = ""
    logprob_mode: str | None = None
    held: bool = False


@dataclass(frozen=True, slots=True)
class Generation:
    """Hold one sampled turn: ids and log-probabilities of equal length, the stop token included.

    `policy_version` is that of the last token as the server itself said, None when it does not
    tell; `version_runs` the versions of all tokens in order, empty when they are one. `seconds`
    is the time of the successful request; `logprob_mode` is the word for what its
    log-probabilities are of (`raw_logprobs`, `processed_logprobs`), None when nobody knows;
    `cached_tokens` how many of the prompt came from its prefix cache, None likewise. A turn that
    was cut (`abort`) holds what was sampled until then, which may be nothing.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    policy_version: int | None
    server_id: str
    seconds: float
    logprob_mode: str | None = None
    version_runs: tuple[VersionRun, ...] = ()
    cached_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """Hold one turn of a server that gives text alone: no ids, no log-probabilities.

    Counts are what the server said it used, 0 when it does not tell.
    """

    parsed: ParsedTurn
    finish_reason: FinishReason
    server_id: str
    seconds: float
    prompt_tokens: int = 0
    sampled_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Health:
    """Say whether a server answers and what it serves; `detail` is a sentence for people."""

    ok: bool
    detail: str
    model: str | None = None
    policy_version: int | None = None
    max_model_len: int | None = None
    logprob_mode: str | None = None


class ServerAdapter(Protocol):
    """Speak one kind of server's HTTP. Thread-safe."""

    def health(self, server: Server, *, timeout_seconds: float) -> Health:
        """Ask the server how it is; never raise for what is wrong with the server."""
        ...


class TokenAdapter(ServerAdapter, Protocol):
    """Speak to a server that takes ids and gives ids with log-probabilities."""

    def generate(
        self,
        server: Server,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        timeout_seconds: float,
        cancelled: Cancelled | None = None,
        interrupted: Cancelled | None = None,
        cache_salt: str | None = None,
    ) -> Generation:
        """Sample one turn; raise an InferenceFault.

        Both callbacks are asked before sending and then every 50 ms, from a thread that all
        requests share: they must answer at once, from memory. When `cancelled` says so the
        request is dropped and GenerationCancelled raised; when `interrupted` says so it is
        dropped and what was sampled so far is returned, its finish_reason `abort`. A server that
        cuts a request by itself gives `abort` as well. Prompts of different `cache_salt` share
        no prefix cache.
        """
        ...


class ChatAdapter(ServerAdapter, Protocol):
    """Speak to a server that takes messages and gives text: for evaluation, never for training."""

    def chat(
        self,
        server: Server,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        sampling: SamplingParams,
        *,
        timeout_seconds: float,
        cancelled: Cancelled | None = None,
    ) -> ChatAnswer:
        """Sample one turn as text and tool calls; raise an InferenceFault."""
        ...


class ControlAdapter(Protocol):
    """Steer a server at a weight update, where its operator allows that.

    Every method raises ControlRefused when the server does not offer it or its operator did not
    allow it, and another InferenceFault when it cannot be reached.
    """

    def pause(self, server: Server, *, abort: bool, timeout_seconds: float) -> None:
        """Stop generation: at once with `abort`, else when the requests that run have ended."""
        ...

    def resume(self, server: Server, *, timeout_seconds: float) -> None:
        """Go on generating."""
        ...

    def weight_version(self, server: Server, *, timeout_seconds: float) -> int | None:
        """Return the version that the server says it serves, None when it does not tell."""
        ...

    def set_weight_version(self, server: Server, version: int, *, timeout_seconds: float) -> None:
        """Tell the server which version its weights are."""
        ...

    def flush_cache(self, server: Server, *, timeout_seconds: float) -> None:
        """Forget every prefix that the server keeps."""
        ...
