"""Steer servers at a weight update, through the routes that their operators opened."""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from rollouts.inference.answers import as_version, parse_object
from rollouts.inference.exceptions import ControlRefused, InferenceFault
from rollouts.inference.protocol import ControlAdapter, Server
from rollouts.inference.statuses import quote, raise_for_status
from rollouts.inference.transport import Transport

DEV_MODE = "start vLLM with VLLM_SERVER_DEV_MODE=1"
ADMIN = "the server's admin API key is needed, or the route is not there"
# What a server answers to a route that it does not have or keeps closed.
REFUSALS = (401, 403, 404, 405, 501)


class _Caller:
    """Call a control route; name the server in every fault."""

    def __init__(self, transport: Transport, advice: str) -> None:
        self._transport = transport
        self._advice = advice

    def call(
        self,
        server: Server,
        method: str,
        path: str,
        *,
        timeout_seconds: float,
        body: Mapping[str, Any] | None = None,
    ) -> bytes:
        """Return the body of a 200. Raises ControlRefused for a closed route, or a fault."""
        try:
            response = self._transport.request(
                method,
                f"{server.url.rstrip('/')}{path}",
                json=None if body is None else dict(body),
                timeout_seconds=timeout_seconds,
            )
            if response.status in REFUSALS:
                route = path.partition("?")[0]
                raise ControlRefused(
                    f"{server.url} answered {response.status} to {route}: {self._advice}"
                )
            raise_for_status(response, server)
        except InferenceFault as fault:
            fault.server_id = server.id
            raise
        return response.body

    def succeed(self, server: Server, said: bytes) -> None:
        """Raise ControlRefused when a 200 says `success: false`."""
        if parse_object(said).get("success") is not True:
            raise ControlRefused(f"{server.url} did not do it: {quote(said)}", server_id=server.id)


class VllmControl:
    """Steer vLLM. Its routes exist only in development mode (0.33.0)."""

    def __init__(self, transport: Transport | None = None) -> None:
        self._caller = _Caller(transport or Transport(), DEV_MODE)

    def pause(self, server: Server, *, abort: bool, timeout_seconds: float) -> None:
        """Stop generation: at once with `abort`, else when the requests that run have ended."""
        mode = "abort" if abort else "wait"
        # The cache is flushed on its own, after the weights are new.
        path = f"/pause?mode={mode}&clear_cache=false"
        self._caller.call(server, "POST", path, timeout_seconds=timeout_seconds)

    def resume(self, server: Server, *, timeout_seconds: float) -> None:
        """Go on generating."""
        self._caller.call(server, "POST", "/resume", timeout_seconds=timeout_seconds)

    def weight_version(self, server: Server, *, timeout_seconds: float) -> int | None:
        """Return the version that the server says it serves, None when it does not tell."""
        said = self._caller.call(server, "GET", "/weight_info", timeout_seconds=timeout_seconds)
        return as_version(parse_object(said).get("weight_version"))

    def set_weight_version(self, server: Server, version: int, *, timeout_seconds: float) -> None:
        """Tell the server which version its weights are."""
        said = self._caller.call(
            server,
            "POST",
            "/update_weight_version",
            body={"new_version": str(version)},
            timeout_seconds=timeout_seconds,
        )
        self._caller.succeed(server, said)

    def flush_cache(self, server: Server, *, timeout_seconds: float) -> None:
        """Forget every prefix that the server keeps."""
        self._caller.call(server, "POST", "/reset_prefix_cache", timeout_seconds=timeout_seconds)


class SglangControl:
    """Steer SGLang (0.5.23)."""

    def __init__(self, transport: Transport | None = None) -> None:
        self._caller = _Caller(transport or Transport(), ADMIN)

    def pause(self, server: Server, *, abort: bool, timeout_seconds: float) -> None:
        """Stop generation: at once with `abort`, else requests that run are put back to wait.

        SGLang has no pause that lets them end first. `retract` computes their prefixes anew when
        they go on, so that nothing of the old weights stays; `in_place` would keep it.
        """
        self._caller.call(
            server,
            "POST",
            "/pause_generation",
            body={"mode": "abort" if abort else "retract"},
            timeout_seconds=timeout_seconds,
        )

    def resume(self, server: Server, *, timeout_seconds: float) -> None:
        """Go on generating."""
        self._caller.call(
            server, "POST", "/continue_generation", body={}, timeout_seconds=timeout_seconds
        )

    def weight_version(self, server: Server, *, timeout_seconds: float) -> int | None:
        """Return the version that the server says it serves, None when it does not tell."""
        said = self._caller.call(server, "GET", "/model_info", timeout_seconds=timeout_seconds)
        return as_version(parse_object(said).get("weight_version"))

    def set_weight_version(self, server: Server, version: int, *, timeout_seconds: float) -> None:
        """Tell the server which version its weights are; requests that run go on."""
        said = self._caller.call(
            server,
            "POST",
            "/update_weight_version",
            body={"new_version": str(version), "abort_all_requests": False},
            timeout_seconds=timeout_seconds,
        )
        self._caller.succeed(server, said)

    def flush_cache(self, server: Server, *, timeout_seconds: float) -> None:
        """Forget every prefix that the server keeps. It refuses while requests run."""
        path = f"/flush_cache?timeout={max(0.0, timeout_seconds - 1):.1f}"
        self._caller.call(server, "POST", path, timeout_seconds=timeout_seconds)


@lru_cache(maxsize=1)
def _controls() -> dict[str, ControlAdapter]:
    transport = Transport()
    vllm = VllmControl(transport)
    return {"vllm": vllm, "vllm_generate": vllm, "sglang": SglangControl(transport)}


def control_for(kind: str) -> ControlAdapter | None:
    """Return this process's control of a kind of servers, None where it has none."""
    return _controls().get(kind)
