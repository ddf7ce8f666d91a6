"""Services' refusals as problems."""

from django.conf import settings
from django.core.exceptions import RequestDataTooBig, ValidationError

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
        case RequestDataTooBig():
            limit = settings.DATA_UPLOAD_MAX_MEMORY_SIZE
            return Problem(
                413, "request.too_large", f"The body is larger than the limit of {limit} bytes."
            )
        case ValidationError():
            return Problem(400, "request.invalid", " ".join(exc.messages))
    return None
