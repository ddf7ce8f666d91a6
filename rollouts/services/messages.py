"""Publishing: a message is a hint that carries one id; the reaper publishes again what is lost.

Nobody waits for the broker: what a transaction publishes is handed, once it has committed, to a
thread of the process that sends it. A broker that is away or hangs costs messages, not time.
"""

import atexit
import logging
import os
import threading
from dataclasses import dataclass
from functools import partial
from uuid import UUID

from celery import Celery, current_app
from django.db import transaction
from kombu.exceptions import OperationalError

from rollouts import queues

logger = logging.getLogger(__name__)

QUEUE_LIMIT = 10_000
HINT_SECONDS = 60.0
FLUSH_SECONDS = 2.0
_RETRY = {"max_retries": 1, "interval_start": 0, "interval_step": 0.2, "interval_max": 0.2}


@dataclass(frozen=True)
class Message:
    """One task to be sent; equal messages that wait are sent once."""

    name: str
    args: tuple[str, ...]
    stage: str
    node: str | None
    expires_seconds: float | None = None


class Publisher:
    """Send messages from a thread of its own, in order; keep at most `limit` waiting."""

    def __init__(self, app: Celery, *, limit: int = QUEUE_LIMIT) -> None:
        self._app = app
        self._limit = limit
        self._waiting: dict[Message, None] = {}
        self._changed = threading.Condition()
        self._sending = False
        self._dropped = 0
        self._failing = False
        self._thread = threading.Thread(target=self._loop, name="publisher", daemon=True)
        self._thread.start()

    def put(self, message: Message) -> None:
        """Take a message for sending, without waiting; it is dropped when too many wait."""
        with self._changed:
            if len(self._waiting) < self._limit or message in self._waiting:
                self._waiting.setdefault(message)
                self._changed.notify_all()
                return
            self._dropped += 1
            first = self._dropped == 1
        if first:
            logger.warning("%d messages wait already: more are left to the reaper", self._limit)

    def flush(self, timeout_seconds: float) -> bool:
        """Wait until nothing waits any more; False when the time ended before."""
        with self._changed:
            return self._changed.wait_for(
                lambda: not self._waiting and not self._sending, timeout_seconds
            )

    def _loop(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._waiting))
                message = next(iter(self._waiting))
                del self._waiting[message]
                self._sending = True
            try:
                self._send(message)
            except OperationalError as error:
                self._give_up(error)
            except Exception as error:
                # Without this thread the process would never publish again.
                logger.debug("sending failed", exc_info=True)
                self._give_up(error)
            else:
                self._note_sent()
            finally:
                with self._changed:
                    self._sending = False
                    self._changed.notify_all()

    def _send(self, message: Message) -> None:
        self._app.send_task(
            message.name,
            args=list(message.args),
            queue=queues.stage_queue(message.stage, message.node),  # type: ignore[arg-type]
            expires=message.expires_seconds,
            retry=True,
            retry_policy=_RETRY,
            argsrepr="(…)",
        )

    def _give_up(self, error: Exception) -> None:
        """Drop what waits: it would only be late, and the reaper publishes it again."""
        with self._changed:
            self._dropped += 1 + len(self._waiting)
            self._waiting.clear()
            first, self._failing = not self._failing, True
        if first:
            logger.warning(
                "broker unreachable (%s: %s): messages wait for the reaper",
                type(error).__name__,
                error,
            )

    def _note_sent(self) -> None:
        with self._changed:
            dropped, self._dropped, self._failing = self._dropped, 0, False
        if dropped:
            logger.info("the broker takes messages again; %d were dropped", dropped)


_publisher: Publisher | None = None
_lock = threading.Lock()


def publisher() -> Publisher:
    """Return the publisher of this process; a forked process makes one of its own."""
    global _publisher
    with _lock:
        if _publisher is None:
            _publisher = Publisher(current_app._get_current_object())  # type: ignore[attr-defined]
        return _publisher


def flush(timeout_seconds: float = FLUSH_SECONDS) -> bool:
    """Wait until what was published is sent or dropped; False when the time ended before."""
    waiting = _publisher
    return waiting is None or waiting.flush(timeout_seconds)


def _forget() -> None:
    """Leave the parent's publisher behind: its thread does not exist after a fork."""
    global _publisher, _lock
    _publisher, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget)
atexit.register(flush)


def _publish(message: Message) -> None:
    transaction.on_commit(partial(_put, message))


def _put(message: Message) -> None:
    publisher().put(message)


def publish_attempt(*, attempt_id: UUID, stage: str, node: str | None) -> None:
    """Publish an attempt to its stage's queue once the transaction has committed."""
    _publish(Message(queues.STAGE_TASK[stage], (str(attempt_id),), stage, node))


def publish_sweep(*, node: str) -> None:
    """Ask a node to remove the sandboxes that nothing owns, once the transaction has committed."""
    _publish(Message(queues.SWEEP_TASK, (node,), queues.INIT, node, HINT_SECONDS))


def publish_image_build(*, build_id: UUID, node: str) -> None:
    """Ask a node to carry out an image build, once the transaction has committed."""
    _publish(Message(queues.IMAGE_TASK, (str(build_id),), queues.INIT, node, HINT_SECONDS))


def publish_reevaluation(*, reevaluation_id: UUID) -> None:
    """Ask an EVAL worker to go on with a re-evaluation, once the transaction has committed."""
    args = (str(reevaluation_id),)
    _publish(Message(queues.REEVALUATION_TASK, args, queues.EVAL, None, HINT_SECONDS))


def publish_import(*, import_id: UUID) -> None:
    """Ask for an import of tasks to be carried out, once the transaction has committed."""
    args = (str(import_id),)
    _publish(Message(queues.IMPORT_TASK, args, queues.CONTROL, None, HINT_SECONDS))


def publish_dispatch() -> None:
    """Ask for a dispatch soon, once the transaction has committed."""
    _publish(Message(queues.DISPATCH_TASK, (), queues.CONTROL, None, HINT_SECONDS))


def publish_policy_updates() -> None:
    """Ask for the updates of policies to be brought on, once the transaction has committed."""
    _publish(Message(queues.UPDATES_TASK, (), queues.CONTROL, None, HINT_SECONDS))


def publish_group_round(*, experiment_id: UUID) -> None:
    """Ask for an experiment's groups to be tended soon, once the transaction has committed."""
    args = (str(experiment_id),)
    _publish(Message(queues.GROUPS_TASK, args, queues.CONTROL, None, HINT_SECONDS))


def publish_feed(*, experiment_id: UUID) -> None:
    """Ask for an experiment to be fed soon, once the transaction has committed."""
    _publish(Message(queues.FEED_TASK, (str(experiment_id),), queues.CONTROL, None, HINT_SECONDS))
