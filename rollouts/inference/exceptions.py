"""Faults of inference, each with the stable code that rows, logs and the API show."""

from typing import ClassVar


class InferenceFault(Exception):
    """Say that a generation did not happen.

    `code` is the stable dotted string; `server_id` the server at fault, where one is;
    `retry_after_seconds` what the server asked for, where it did. `retryable_elsewhere` tells
    whether another server may succeed; `server_is_suspect` whether the breaker counts it.
    """

    code: ClassVar[str] = "inference.fault"
    retryable_elsewhere: ClassVar[bool] = False
    server_is_suspect: ClassVar[bool] = False

    def __init__(
        self,
        message: str,
        *,
        server_id: str | None = None,
        retry_after_seconds: float | None = None,
    ) -> None:
        super().__init__(message)
        self.server_id = server_id
        self.retry_after_seconds = retry_after_seconds


class ServerUnreachable(InferenceFault):
    """Say that no connection could be made, or that it broke before the answer was whole."""

    code = "inference.unreachable"
    retryable_elsewhere = True
    server_is_suspect = True


class GenerationTimeout(InferenceFault):
    """Say that the answer did not arrive within the time given."""

    code = "inference.timeout"
    server_is_suspect = True


class ServerOverloaded(InferenceFault):
    """Say that the server asked for less work (429, or 503 with Retry-After)."""

    code = "inference.overloaded"
    retryable_elsewhere = True


class ServerFailed(InferenceFault):
    """Say that the server answered with a 5xx status."""

    code = "inference.server_error"
    retryable_elsewhere = True
    server_is_suspect = True


class MalformedAnswer(InferenceFault):
    """Say that the answer breaks the contract: not JSON, lengths unequal, not finite, no ids."""

    code = "inference.malformed"
    retryable_elsewhere = True


class RequestRejected(InferenceFault):
    """Say that the server refused the request itself (a 4xx): sending it again changes nothing."""

    code = "inference.rejected"


class WrongModel(InferenceFault):
    """Say that the server does not serve the model that was asked for."""

    code = "inference.wrong_model"
    retryable_elsewhere = True
    server_is_suspect = True


class NoServer(InferenceFault):
    """Say that no registered server could take the request within the time given."""

    code = "inference.no_server"


class GenerationCancelled(InferenceFault):
    """Say that the caller cancelled while waiting."""

    code = "inference.cancelled"


class ContextFull(InferenceFault):
    """Say that prompt and answer do not fit the model: the episode's end, no fault of ours."""

    code = "inference.context_full"


class RouterUnavailable(InferenceFault):
    """Say that the store which workers share for routing does not answer."""

    code = "inference.router_unavailable"


class UnknownServerKind(InferenceFault):
    """Say that no adapter speaks to servers of this kind."""

    code = "inference.unknown_kind"


class ControlRefused(InferenceFault):
    """Say that a server does not offer a control call, or its operator did not allow it."""

    code = "inference.control_refused"


class RenderingFault(InferenceFault):
    """Say that messages cannot be turned into token ids with this tokenizer folder."""

    code = "inference.rendering"


class CannotExtend(RenderingFault):
    """Say that a template cannot extend a conversation exactly: it has to be rendered anew."""

    code = "inference.cannot_extend"
