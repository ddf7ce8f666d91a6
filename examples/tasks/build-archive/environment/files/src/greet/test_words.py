"""Tests of the words."""

import unittest

from greet.words import greeting


class GreetingTest(unittest.TestCase):
    """Check the greeting."""

    def test_name(self) -> None:
        """Hold the name."""
        self.assertEqual(greeting("Ada"), "Hello, Ada!")
