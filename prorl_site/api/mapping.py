"""Services' refusals as problems."""

import logging

from django.conf import settings
from django.core.exceptions import RequestDataTooBig, ValidationError
from django.db import InterfaceError, OperationalError

from prorl_site.api.exceptions import Problem
from rollouts.exceptions import RolloutError

logger = logging.getLogger(__name__)

RETRY_SECONDS = 5.0


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
        case OperationalError() | InterfaceError():
            logger.error("the database refused a call: %s", exc, exc_info=exc)
            return Problem(
                503,
                "service.unavailable",
                "The database does not answer or is overloaded; try again.",
                retry_after=RETRY_SECONDS,
            )
        case RequestDataTooBig():
            limit = settings.DATA_UPLOAD_MAX_MEMORY_SIZE
            return Problem(
                413, "request.too_large", f"The body is larger than the limit of {limit} bytes."
            )
        case ValidationError():
            return Problem(400, "request.invalid", " ".join(exc.messages))
    return None
