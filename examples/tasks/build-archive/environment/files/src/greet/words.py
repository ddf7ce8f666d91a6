"""The words of a greeting."""


def greeting(name: str) -> str:
    """Return a greeting for one name."""
    return f"Hello, {name}!"
