"""Bound how often an episode may ask outside, and how much of an answer it sees."""

from __future__ import annotations

from dataclasses import dataclass

from sandboxes.runtime.streams import HeadTail


@dataclass
class CallBudget:
    """Count the calls of one episode; tools of one server may share it."""

    most: int
    used: int = 0

    def take(self) -> bool:
        """Count one call; False when none is left."""
        if self.used >= self.most:
            return False
        self.used += 1
        return True

    def spent(self, tool: str) -> str:
        """Return what the policy is told when no call is left."""
        return f"All {self.most} calls of {tool} that this task allows are used; go on without it."


def bounded(text: str, output_bytes: int) -> tuple[str, bool]:
    """Return the beginning and the end of a text, and whether something was left out."""
    kept = HeadTail(output_bytes)
    kept.feed(text.encode("utf-8", "replace"))
    if not kept.truncated:
        return text, False
    shown = kept.joined().decode("utf-8", "replace")
    return f"{shown}\n[truncated: {output_bytes} bytes of the answer are shown]", True
