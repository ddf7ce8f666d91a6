"""Faults and refusals, each with a stable dotted code."""


class RolloutError(Exception):
    """A request that the service refuses; `code` is stable, the message says what to do."""

    code = "request.refused"
    status = 400

    def __init__(
        self, message: str, *, code: str | None = None, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        if code is not None:
            self.code = code
        self.retry_after = retry_after


class UnknownReference(RolloutError):
    """Something named in the request does not exist."""

    code = "reference.unknown"


class InvalidValue(RolloutError):
    """A value is outside of what the service accepts."""

    code = "request.invalid"


class StateConflict(RolloutError):
    """The thing is in a state in which the call has no meaning."""

    code = "state.conflict"
    status = 409


class NotThere(RolloutError):
    """The addressed thing does not exist or is not the caller's."""

    code = "not_found"
    status = 404


class LeaseLost(Exception):
    """The caller no longer holds the attempt: its result is not wanted, and nothing was written."""


class InfraFault(Exception):
    """A fault that is the service's to answer for: retried to a cap, never a reward."""

    code = "infra.unknown"
    restart_from_init = False
    timed_out = False

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        restart_from_init: bool | None = None,
        timed_out: bool | None = None,
        retryable: bool = True,
    ) -> None:
        super().__init__(message)
        if code is not None:
            self.code = code
        if restart_from_init is not None:
            self.restart_from_init = restart_from_init
        if timed_out is not None:
            self.timed_out = timed_out
        self.retryable = retryable


class StageTimeout(InfraFault):
    """A stage used up its budget."""

    code = "stage.timeout"
    timed_out = True


class AttemptCancelled(Exception):
    """The rollout was cancelled while a stage worked on it."""
