"""What a sandbox reaches while a stage works in it, as its environment says."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from urllib.parse import urlsplit

from django.conf import settings

from rollouts.exceptions import InfraFault
from sandboxes.models import Environment
from sandboxes.network.allow_list import parse_pattern
from sandboxes.network.proxy import PORT, AllowListProxy, proxy_env
from sandboxes.network.relay import Address, Relay
from sandboxes.runtime.protocol import SandboxHandle
from sandboxes.services.node import node_runtime
from sandboxes.states import Network

logger = logging.getLogger(__name__)

MODEL_PORT = 8080
NO_ENV: Mapping[str, str] = {}


@contextmanager
def reachable(
    handle: SandboxHandle,
    *,
    environment: Environment,
    model: Callable[[], str | None] | None = None,
) -> Iterator[Mapping[str, str]]:
    """Serve the sandbox's network for a while; yields the variables that its programs need.

    `model` gives the address (a URL) of a server of the rollout's policy, or None when there is
    none now; without it the sandbox of a "model only" environment reaches nothing. Raises
    InfraFault when this node does not permit what the environment wants.
    """
    if environment.network == Network.ALLOW_LIST:
        _require_egress(environment)
        patterns = [parse_pattern(host) for host in environment.egress_hosts]
        with AllowListProxy(node_runtime().listen(handle, PORT), patterns) as proxy:
            yield proxy_env()
        if proxy.refused:
            logger.info("sandbox %s was refused: %s", handle.name, dict(proxy.refused))
    elif environment.network == Network.MODEL_ONLY and model is not None:
        with Relay(node_runtime().listen(handle, MODEL_PORT), lambda: _address(model())):
            yield {"OPENAI_BASE_URL": f"http://127.0.0.1:{MODEL_PORT}/v1", "OPENAI_API_KEY": "none"}
    else:
        yield NO_ENV


def _require_egress(environment: Environment) -> None:
    if not settings.EGRESS:
        raise InfraFault(
            f"Environment {environment.ref} wants to reach listed hosts, and this node does not "
            f"permit it: set PRORL_EGRESS=1 there, or give the environment another network.",
            code="sandbox.egress_forbidden",
            retryable=False,
        )


def _address(url: str | None) -> Address | None:
    if url is None:
        return None
    parts = urlsplit(url)
    if parts.scheme != "http" or parts.hostname is None:
        return None
    return parts.hostname, parts.port or 80
