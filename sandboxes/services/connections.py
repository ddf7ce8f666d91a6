"""Database connections of a thread that is about to wait."""

from django.db import connection


def release_connection() -> None:
    """Give the thread's database connection back to the pool; inside a transaction it stays."""
    if not connection.in_atomic_block:
        connection.close()
