"""Keep judges' votes on a node: the same question to the same judge costs once.

SQLite, because it comes with Python and locks among processes; diskcache keeps pickles, which
whoever can write the folder could make run. A cache that cannot be used is none: it only costs.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FILE = "votes.sqlite3"
WAIT_SECONDS = 2.0
_TABLE = (
    "CREATE TABLE IF NOT EXISTS vote (key TEXT PRIMARY KEY, body TEXT NOT NULL, used REAL NOT NULL)"
    " WITHOUT ROWID"
)
_INDEX = "CREATE INDEX IF NOT EXISTS vote_used ON vote (used)"


class VoteCache:
    """Map a request's hash to its answer, within a size; without a folder it holds nothing."""

    def __init__(self, folder: str | None, most_bytes: int) -> None:
        self._folder = Path(folder) if folder else None
        self._most_bytes = most_bytes

    def get(self, key: str) -> dict[str, Any] | None:
        """Return what is kept under a key, None when nothing is or it cannot be read."""
        with contextlib.suppress(sqlite3.Error, OSError, ValueError), self._open() as database:
            row = database.execute("SELECT body FROM vote WHERE key = ?", (key,)).fetchone()
            if row is not None:
                database.execute("UPDATE vote SET used = ? WHERE key = ?", (time.time(), key))
                body = json.loads(row[0])
                return body if isinstance(body, dict) else None
        return None

    def put(self, key: str, body: dict[str, Any]) -> None:
        """Keep an answer; the longest unused ones make room."""
        with contextlib.suppress(sqlite3.Error, OSError), self._open() as database:
            database.execute(
                "INSERT OR REPLACE INTO vote VALUES (?, ?, ?)", (key, json.dumps(body), time.time())
            )
            while self._bytes(database) > self._most_bytes:
                gone = database.execute(
                    "DELETE FROM vote WHERE key IN (SELECT key FROM vote ORDER BY used LIMIT "
                    "(SELECT 1 + count(*) / 10 FROM vote))"
                )
                if gone.rowcount < 1:
                    break

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        if self._folder is None:
            raise sqlite3.OperationalError("no folder")
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        database = sqlite3.connect(self._folder / FILE, timeout=WAIT_SECONDS)
        try:
            database.execute("PRAGMA journal_mode = WAL")
            with database:
                database.execute(_TABLE)
                database.execute(_INDEX)
                yield database
        finally:
            database.close()

    def _bytes(self, database: sqlite3.Connection) -> int:
        pages, free, size = (
            int(database.execute(f"PRAGMA {name}").fetchone()[0])
            for name in ("page_count", "freelist_count", "page_size")
        )
        return (pages - free) * size
