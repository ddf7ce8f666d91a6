"""Each fault has a code of its own."""

from sandboxes.runtime import exceptions
from sandboxes.runtime.exceptions import SandboxFault


def test_codes_are_distinct_and_dotted() -> None:
    kinds = [
        kind
        for kind in vars(exceptions).values()
        if isinstance(kind, type) and issubclass(kind, SandboxFault)
    ]
    codes = [kind.code for kind in kinds]

    assert len(set(codes)) == len(kinds)
    assert len(kinds) > 10
    assert all(code.startswith("sandbox.") for code in codes)
