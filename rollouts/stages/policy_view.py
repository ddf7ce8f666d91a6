"""What one rollout knows of its policy: servers, version, open update, read anew where it must."""

import time

from rollouts.inference.protocol import Server
from rollouts.models import Policy
from rollouts.services.routable import Routable, last_read, routable_servers
from rollouts.stages.turnstile import GateShut, InForce
from rollouts.states import UpdateMode


class PolicyView:
    """Remember what was read last. Not thread-safe."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.version, self.epoch = policy.version, policy.weights_epoch
        # What was known when the last request was asked.
        self.entered: Routable | None = None
        # What was read before is not believed.
        self._since = 0.0

    def begin_anew(self) -> None:
        """Believe nothing that was read until now."""
        self._since = time.monotonic()

    def present(self) -> Routable:
        """Return the policy's state, read after the last `begin_anew`, a second old at most."""
        return self.read(since=self._since)

    def servers(self) -> list[Server]:
        """Return the servers that may get requests."""
        return list(self.present().servers)

    def read(self, *, since: float) -> Routable:
        """Return the policy's state as read after the monotonic time `since`."""
        found = routable_servers(policy=self.policy, since=since)
        if found.version is not None:
            self.version, self.epoch = found.version, found.epoch
        return found

    def salt(self) -> str:
        """Return what keeps the prefix caches of different weights apart."""
        return f"{self.policy.pk.hex[:8]}-{self.epoch}"

    def in_force(self, told: int | None) -> InForce:
        """Return what a request is asked with; read anew unless the store was told the same.

        Raises GateShut where the database knows of an update that holds requests back.
        """
        now = self.read(since=0.0 if told == self.epoch else time.monotonic())
        if now.update is not None and now.holds_requests():
            raise GateShut(str(now.update[0]))
        self.entered = now
        return InForce(self.version, self.epoch, self.salt())

    def cuts(self, *, queues: bool) -> bool:
        """Tell whether an update ends the present request; from memory.

        Who still queues need not stand there meanwhile: the wait is the update's.
        """
        known = last_read(policy=self.policy)
        if known is None or known.update is None:
            return False
        return known.update[1] == UpdateMode.ABORT or (queues and known.holds_requests())
