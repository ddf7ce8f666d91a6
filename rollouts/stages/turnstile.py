"""Let each request of a rollout through its policy's gate, and know when one is under way."""

import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

from rollouts.inference.exceptions import GenerationCancelled, InferenceFault
from rollouts.inference.gate import Pass, PolicyGate, Shut
from rollouts.inference.protocol import Health, Server


class GateShut(InferenceFault):
    """Say that an update of the policy holds back requests; `mark` is the update's id."""

    code: ClassVar[str] = "inference.gate_shut"

    def __init__(self, mark: str) -> None:
        super().__init__("an update of the policy holds back generation")
        self.mark = mark


@dataclass(frozen=True, slots=True)
class InForce:
    """What a request is asked with: the policy's version, its weights' epoch, the cache salt."""

    version: int
    epoch: int
    salt: str


class Turnstile:
    """Hold a pass of the gate while a request is under way. One rollout, one thread.

    `in_force` gives what the policy's requests are asked with, read anew when the epoch that the
    store told is another or none; it raises GateShut when the database knows of an update that
    holds requests back, as a store that lost its data does not.
    """

    def __init__(
        self, gate: PolicyGate, policy_id: str, in_force: Callable[[int | None], InForce]
    ) -> None:
        self._gate = gate
        self._policy_id = policy_id
        self._in_force = in_force
        self._pass: Pass | None = None
        self._began: float | None = None
        self._seconds = 0.0
        # The version in force when the last request was asked.
        self.version: int = 0
        self.salt = ""

    @property
    def lapsed(self) -> bool:
        """Tell whether the last request was counted no longer, as a dead worker's; from memory."""
        return self._pass is not None and self._pass.lapsed

    def is_cut(self) -> bool:
        """Tell whether the present request lapsed, so that it must end; from memory."""
        return self._began is not None and self.lapsed

    def busy_seconds(self) -> float:
        """Return the seconds of the present request, 0 when none is under way."""
        began = self._began
        return 0.0 if began is None else time.monotonic() - began

    def is_busy(self) -> bool:
        """Tell whether a request is under way."""
        return self._began is not None

    def forget_seconds(self) -> None:
        """Count from now on: a call that is cut before its request began took none."""
        self._seconds = 0.0

    def last_seconds(self) -> float:
        """Return the seconds of the last request since `forget_seconds`, 0 of one that failed."""
        return self._seconds

    @contextmanager
    def request(self) -> Iterator[None]:
        """Have a request under way inside. Raises GateShut, RouterUnavailable."""
        self._seconds = 0.0
        entered = self._gate.enter(self._policy_id, secrets.token_hex(12))
        if isinstance(entered, Shut):
            raise GateShut(entered.mark)
        self._pass = entered
        failed = True
        try:
            now = self._in_force(entered.epoch)
            if entered.epoch is None or entered.epoch < now.epoch:
                self._gate.tell(entered, now.epoch)
            self.version, self.salt = now.version, now.salt
            self._began = time.monotonic()
            yield
            failed = False
        except GenerationCancelled:
            failed = False  # a text that was cut: the caller decides whose time that was
            raise
        finally:
            self._seconds, self._began = 0.0 if failed else self.busy_seconds(), None
            self._gate.leave(entered)


class GatedAdapters(Mapping[str, Any]):
    """Offer the adapters with each request going through a turnstile."""

    def __init__(self, adapters: Mapping[str, Any], turnstile: Turnstile, *, chat: bool) -> None:
        self._adapters = adapters
        self._turnstile = turnstile
        self._gated = _GatedChat if chat else _GatedTokens

    def __getitem__(self, kind: str) -> Any:
        return self._gated(self._adapters[kind], self._turnstile)

    def __contains__(self, kind: object) -> bool:
        return kind in self._adapters

    def __iter__(self) -> Iterator[str]:
        return iter(self._adapters)

    def __len__(self) -> int:
        return len(self._adapters)


class _Gated:
    def __init__(self, adapter: Any, turnstile: Turnstile) -> None:
        self._adapter = adapter
        self._turnstile = turnstile

    def health(self, server: Server, *, timeout_seconds: float) -> Health:
        health: Health = self._adapter.health(server, timeout_seconds=timeout_seconds)
        return health


class _GatedTokens(_Gated):
    def generate(self, *arguments: Any, **named: Any) -> Any:
        """Generate with a pass; prompts of different weights share no prefix cache."""
        with self._turnstile.request():
            return self._adapter.generate(
                *arguments, **{**named, "cache_salt": self._turnstile.salt}
            )


class _GatedChat(_Gated):
    def chat(self, *arguments: Any, **named: Any) -> Any:
        """Chat with a pass."""
        with self._turnstile.request():
            return self._adapter.chat(*arguments, **named)
