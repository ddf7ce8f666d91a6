"""One trajectory a line, in the service's own form; `read_jsonl` reads it back."""

from __future__ import annotations

import json
from typing import IO

from prorl_client.exports.base import Export
from prorl_client.trajectories import Trajectory


class JsonlExport(Export):
    """A file with a JSON object a line."""

    needs_messages = True
    _file: IO[str]

    def open(self) -> None:
        """Begin to write."""
        self._file = self.partial.open("x", encoding="utf-8")

    def add(self, trajectory: Trajectory) -> None:
        """Write a line."""
        json.dump(trajectory.as_dict(), self._file, separators=(",", ":"), ensure_ascii=False)
        self._file.write("\n")

    def finish(self) -> None:
        """Close the file."""
        self._file.close()
