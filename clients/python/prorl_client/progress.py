"""A progress bar where tqdm is installed, and nothing where it is not."""

from __future__ import annotations

from types import TracebackType
from typing import Any


class Progress:
    """Show how many of `total` things are done; does nothing unless `shown`."""

    def __init__(self, what: str, total: int | None, *, shown: bool) -> None:
        self._bar: Any = _bar(what, total) if shown else None
        self._done = 0

    def set(self, done: int, note: str = "") -> None:
        """Show so many as done."""
        if self._bar is not None:
            if note:
                self._bar.set_postfix_str(note, refresh=False)
            self._bar.update(done - self._done)
        self._done = done

    def add(self, count: int = 1) -> None:
        """Show so many more as done."""
        self.set(self._done + count)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        fault: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()


def _bar(what: str, total: int | None) -> Any:
    try:
        from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]
    except ImportError:
        return None
    return tqdm(desc=what, total=total)
