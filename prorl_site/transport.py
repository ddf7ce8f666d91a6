"""kombu's Redis transport, for workers that outlive a restart of their broker."""

import logging
from typing import Any

from kombu.transport import redis

logger = logging.getLogger(__name__)


class QoS(redis.QoS):
    """Hold what was delivered and not acknowledged yet."""

    def restore_unacked(self, client: Any = None) -> None:
        """Put it back into its queues, if the broker answers.

        kombu does this as it closes a lost connection, where it cannot work and ends the worker
        (AttributeError in `_connparams`). Our attempts are rows: what nobody takes is sent again.
        """
        try:
            super().restore_unacked(client)
        except Exception as fault:  # whatever goes wrong here must not end the worker
            delivered: dict[str, Any] = self._delivered or {}
            logger.warning("%d messages are left to be sent again: %s", len(delivered), fault)
            delivered.clear()


class Channel(redis.Channel):
    """A channel with that."""

    QoS = QoS


class Transport(redis.Transport):
    """The transport that settings name."""

    Channel = Channel
