"""Run two callables against each other on real connections."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from django.db import connection, transaction


def together(*calls: Callable[[], Any]) -> list[Any]:
    """Run all at the same moment, each in its own thread; exceptions are results."""
    barrier = threading.Barrier(len(calls))

    def one(call: Callable[[], Any]) -> Any:
        try:
            barrier.wait(timeout=10)
            return call()
        except Exception as error:
            return error
        finally:
            connection.close()

    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(timeout=60) for future in [pool.submit(one, call) for call in calls]]


def while_open(first: Callable[[], Any], second: Callable[[], Any]) -> tuple[Any, Any]:
    """Run `first` in a transaction that commits only once `second` waits for it or is through.

    The order is certain: `first` has its locks before `second` begins.
    """
    has_locks, may_commit = threading.Event(), threading.Event()

    def leading() -> Any:
        try:
            with transaction.atomic():
                result = first()
                has_locks.set()
                assert may_commit.wait(timeout=30)
            return result
        except Exception as error:
            has_locks.set()
            return error
        finally:
            connection.close()

    def following() -> Any:
        try:
            assert has_locks.wait(timeout=30)
            return second()
        except Exception as error:
            return error
        finally:
            connection.close()

    with ThreadPoolExecutor(2) as pool:
        one, two = pool.submit(leading), pool.submit(following)
        assert has_locks.wait(timeout=30)
        _wait_until_blocked_or_done(two.done)
        may_commit.set()
        return one.result(timeout=60), two.result(timeout=60)


def _wait_until_blocked_or_done(done: Callable[[], bool]) -> None:
    """Return once some other backend waits for a lock, or the second call is through."""
    for _round in range(20_000):
        if done():
            return
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
                "AND wait_event_type = 'Lock'"
            )
            row = cursor.fetchone()
        if row and row[0]:
            return
    raise AssertionError("the second call neither waits nor ends")
