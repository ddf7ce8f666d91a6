"""Tests of the intervals."""

import unittest

from intervals import merge, subtract, total


class IntervalsTest(unittest.TestCase):
    """Check merging, subtracting and counting."""

    def test_merge_overlapping(self) -> None:
        """Join intervals that overlap."""
        self.assertEqual(merge([(1, 4), (3, 6), (8, 9)]), [(1, 6), (8, 9)])

    def test_merge_nested(self) -> None:
        """Keep the outer interval."""
        self.assertEqual(merge([(1, 10), (2, 3)]), [(1, 10)])

    def test_subtract(self) -> None:
        """Cut a hole."""
        self.assertEqual(subtract([(0, 10)], [(3, 5)]), [(0, 3), (5, 10)])

    def test_total(self) -> None:
        """Count each number once."""
        self.assertEqual(total([(0, 5), (3, 8)]), 8)


if __name__ == "__main__":
    unittest.main()
