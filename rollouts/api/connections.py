"""Giving the database connection back before a wait."""

from django.db import connection


def let_go_of_connection() -> None:
    """Return this thread's connection to the pool, unless a transaction is open on it."""
    if not connection.in_atomic_block:
        connection.close()
