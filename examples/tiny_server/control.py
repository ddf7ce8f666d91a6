"""The routes by which a trainer steers the server: pause, abort, weights, prefix cache.

As in vLLM started for development, they are open to whoever reaches the port.
"""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from examples.tiny_server.engine import PAUSE_MODES, Engine, PauseMode
from examples.tiny_server.fields import mapping, refuse, text
from examples.tiny_server.json_http import Answer, EventStream, Exchange, HangUpError, HttpError
from examples.tiny_server.tensors import TensorError, read_tensors, replaced
from examples.tiny_server.weights import Weights

CONNECTED_POLL_SECONDS = 0.2
MAX_ABORTED_NAMES = 10_000


class Control:
    """Steer one engine. Weights are read below `weights_dir` alone, and nowhere when None."""

    def __init__(self, engine: Engine, weights_dir: Path | None) -> None:
        self._engine = engine
        self._weights_dir = None if weights_dir is None else weights_dir.resolve()
        # One update at a time: two would each start from the weights before the other.
        self._updating = threading.Lock()
        self._staged: Weights | None = None
        self._open = False

    def routes(self) -> dict[tuple[str, str], Callable[[Exchange], Answer | EventStream]]:
        """Return what a server shall offer."""
        return {
            ("POST", "/pause"): self._pause,
            ("POST", "/resume"): self._resume,
            ("GET", "/is_paused"): self._is_paused,
            ("POST", "/abort_requests"): self._abort,
            ("POST", "/reset_prefix_cache"): self._reset,
            ("POST", "/start_weight_update"): self._start,
            ("POST", "/update_weights"): self._update,
            ("POST", "/finish_weight_update"): self._finish,
            ("POST", "/update_weight_version"): self._relabel,
            ("GET", "/weight_info"): self._info,
        }

    def _pause(self, exchange: Exchange) -> Answer:
        mode = exchange.query.get("mode", "abort")
        if mode not in PAUSE_MODES:
            raise refuse("mode", f"mode must be one of {', '.join(PAUSE_MODES)}")
        clear = _truth(exchange, "clear_cache", default=True)
        self._engine.pause(cast(PauseMode, mode))
        while not self._engine.settled(CONNECTED_POLL_SECONDS):
            if not exchange.connected():
                raise HangUpError
        if clear and mode != "keep":
            self._engine.reset_prefixes()
        return Answer({"status": "paused"})

    def _resume(self, _exchange: Exchange) -> Answer:
        self._engine.resume()
        return Answer({"status": "resumed"})

    def _is_paused(self, _exchange: Exchange) -> Answer:
        return Answer({"is_paused": self._engine.paused})

    def _abort(self, exchange: Exchange) -> Answer:
        names = exchange.json().get("request_ids") or []
        listed = isinstance(names, list) and all(isinstance(name, str) for name in names)
        if not listed or len(names) > MAX_ABORTED_NAMES:
            raise refuse("request_ids", "request_ids must be a list of texts")
        return Answer({"status": "aborted", "aborted": self._engine.abort(names)})

    def _reset(self, _exchange: Exchange) -> Answer:
        self._engine.reset_prefixes()
        return Answer({"success": True})

    def _start(self, _exchange: Exchange) -> Answer:
        with self._updating:
            if self._open:
                raise HttpError(400, "a weight update is open already: finish it first")
            self._open = True
        return Answer({"message": "Weight update started"})

    def _update(self, exchange: Exchange) -> Answer:
        """Read a file of tensors; exchange them at once, or at the end of the open update."""
        info = mapping(exchange.json(), "update_info")
        version = text(info, "weight_version") or None
        path = self._allowed(info.get("path"))
        with self._updating:
            try:
                before = self._staged or self._engine.model.weights
                weights = replaced(before, read_tensors(path))
            except TensorError as error:
                raise refuse("update_info", str(error)) from error
            if self._open:
                if version is not None:
                    raise refuse("update_info", "an open update takes its version at its end")
                self._staged = weights
            else:
                self._engine.exchange(weights, version)
        return Answer({"message": "Weights updated"})

    def _finish(self, exchange: Exchange) -> Answer:
        """Exchange what the open update holds, all of it between two steps."""
        version = text(_optional(exchange), "weight_version") or None
        with self._updating:
            if not self._open:
                raise HttpError(400, "no weight update is open: start one first")
            if self._staged is not None:
                self._engine.exchange(self._staged, version)
            elif version is not None:
                self._engine.relabel(version)
            self._open, self._staged = False, None
        return Answer({"message": "Weight update finished"})

    def _relabel(self, exchange: Exchange) -> Answer:
        version = text(exchange.json(), "new_version")
        if not version:
            raise refuse("new_version", "new_version must be a text that is not empty")
        with self._updating:
            self._engine.relabel(version)
        return Answer({"success": True, "new_version": version})

    def _info(self, _exchange: Exchange) -> Answer:
        return Answer({"weight_version": self._engine.weight_version})

    def _allowed(self, value: Any) -> Path:
        """Return the file that a path names, below the folder that the operator opened."""
        if self._weights_dir is None:
            raise HttpError(403, "no folder is open for weights: start with --weights-dir")
        if not isinstance(value, str) or not value or "\0" in value:
            raise refuse("update_info", "update_info.path must name a file")
        path = (self._weights_dir / value).resolve()
        if not path.is_relative_to(self._weights_dir) or not path.is_file():
            raise refuse("update_info", "update_info.path must name a file below --weights-dir")
        return path


def _optional(exchange: Exchange) -> dict[str, Any]:
    return exchange.json() if exchange.body.strip() else {}


def _truth(exchange: Exchange, name: str, *, default: bool) -> bool:
    value = exchange.query.get(name)
    if value is None:
        return default
    if value.lower() not in ("true", "false", "1", "0"):
        raise refuse(name, f"{name} must be true or false")
    return value.lower() in ("true", "1")
