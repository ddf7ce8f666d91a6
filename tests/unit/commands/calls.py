"""Call a management command as the shell would."""

import io
from dataclasses import dataclass

from django.core.management import call_command


@dataclass(frozen=True)
class Called:
    """What a command left: exit code and its two streams."""

    code: int
    out: str
    err: str


def call(*arguments: str) -> Called:
    """Call a command by its command line; a CommandError is raised on."""
    out, err = io.StringIO(), io.StringIO()
    code = 0
    try:
        call_command(*arguments, stdout=out, stderr=err, no_color=True)
    except SystemExit as end:
        code = int(end.code or 0)
    return Called(code, out.getvalue(), err.getvalue())
