"""Health: is the process up, and can the service do its work."""

import logging
from collections.abc import Callable

from django.http import HttpRequest, JsonResponse
from django.views.decorators.http import require_safe

from rollouts.services import health
from rollouts.services.health import Probe

logger = logging.getLogger(__name__)

PROBES: dict[str, Callable[[], list[Probe]]] = {
    "database": health.check_database,
    "broker": health.check_broker,
    "storage": health.check_storage,
    "workers": health.check_workers,
}


@require_safe
def healthz(_request: HttpRequest) -> JsonResponse:
    """Say that the process answers; nothing else is asked."""
    return JsonResponse({"status": "ok"})


@require_safe
def readyz(_request: HttpRequest) -> JsonResponse:
    """Say whether database, broker, storage and a worker of each stage are there.

    Nobody logs in here, so addresses and paths are told to the log only.
    """
    found = [probe for name in PROBES for probe in _probe(name)]
    for probe in found:
        if not probe.ok:
            logger.warning("not ready: %s: %s", probe.name, probe.detail)
    ready = all(probe.ok for probe in found)
    checks = {probe.name: {"ok": probe.ok} for probe in found}
    return JsonResponse({"ready": ready, "checks": checks}, status=200 if ready else 503)


def _probe(name: str) -> list[Probe]:
    try:
        return PROBES[name]()
    except Exception as fault:  # whatever goes wrong in a probe is its answer
        logger.exception("the probe of %s failed", name)
        return [Probe(name=name, ok=False, detail=f"{type(fault).__name__}: {fault}")]
