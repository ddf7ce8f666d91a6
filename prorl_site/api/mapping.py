"""Services' refusals as problems."""

from django.core.exceptions import ValidationError

from prorl_site.api.exceptions import Problem
from rollouts.exceptions import RolloutError


def to_problem(exc: Exception) -> Problem | None:
    """Return the problem that answers a service's refusal, or None for anything else."""
    match exc:
        case RolloutError():
            return Problem(exc.status, exc.code, str(exc), retry_after=exc.retry_after)
        case ValidationError() if hasattr(exc, "error_dict"):
            return Problem(
                400,
                "request.invalid",
                "Some fields are missing or wrong.",
                errors=exc.message_dict,
            )
        case ValidationError():
            return Problem(400, "request.invalid", " ".join(exc.messages))
    return None
