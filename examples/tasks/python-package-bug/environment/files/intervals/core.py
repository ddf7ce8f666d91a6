"""Work with half-open intervals `(start, end)` of whole numbers, `start < end`."""

from collections.abc import Iterable

Interval = tuple[int, int]


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union as disjoint intervals in order; those that touch become one."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start < merged[-1][1]:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return merged


def subtract(left: Iterable[Interval], right: Iterable[Interval]) -> list[Interval]:
    """Return what is in `left` and not in `right`, as disjoint intervals in order."""
    rest = merge(left)
    for hole_start, hole_end in merge(right):
        kept: list[Interval] = []
        for start, end in rest:
            if hole_end <= start or end <= hole_start:
                kept.append((start, end))
                continue
            if start < hole_start:
                kept.append((start, hole_start))
            if hole_end < end:
                kept.append((hole_end, end))
        rest = kept
    return rest


def total(intervals: Iterable[Interval]) -> int:
    """Return how many whole numbers the union holds."""
    return sum(end - start for start, end in intervals)
