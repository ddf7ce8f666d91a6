"""Half-open intervals."""

from intervals.core import merge, subtract, total

__all__ = ["merge", "subtract", "total"]
