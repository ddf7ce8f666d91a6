"""Give database connections back to the pool before anything that waits."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import ParamSpec, TypeVar

from sandboxes.services.connections import release_connection

P = ParamSpec("P")
R = TypeVar("R")


@contextmanager
def database() -> Iterator[None]:
    """Use the database inside; the thread's connection goes back to the pool after it."""
    try:
        yield
    finally:
        release_connection()


def with_database(function: Callable[P, R]) -> Callable[P, R]:
    """Run a function with the database, and give the connection back after it."""

    @wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        with database():
            return function(*args, **kwargs)

    return wrapped
