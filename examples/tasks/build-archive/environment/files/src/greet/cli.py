"""Command line of greet."""

import sys

from greet._version import VERSION
from greet.words import greeting


def main() -> None:
    """Greet everybody named, or print the version."""
    if sys.argv[1:] == ["--version"]:
        print(f"greet {VERSION}")
        return
    for name in sys.argv[1:] or ["world"]:
        print(greeting(name))
