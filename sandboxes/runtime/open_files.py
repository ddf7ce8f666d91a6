"""How many files this process may have open, and what those that it starts get."""

from __future__ import annotations

import resource

_found: int | None = None


def raise_file_limit() -> None:
    """Raise the soft limit of open files to the hard one; once, before threads start.

    A worker holds several descriptors for each sandbox: the usual 1024 are few for many.
    """
    global _found
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    _found = soft if _found is None else _found
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def found_file_limit() -> int:
    """Return the soft limit as this process, or the parent it was forked from, found it."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] if _found is None else _found
