"""Read what every evaluator with a sandbox lets a task say: what is graded, and its network."""

from __future__ import annotations

import posixpath

from evaluators.base import WHOLE, InvalidSettings, JsonMap
from evaluators.settings import read_choice, read_flag

GRADING_SETTINGS = frozenset({"scope", "workspace", "network"})
SCOPES = ("workspace", "whole")
MAX_FOLDERS = 32
MAX_PATH_CHARACTERS = 1_000


def read_workspace(settings: JsonMap) -> tuple[str, ...]:
    """Return the folders that are taken from what the agent left.

    (): the environment's working directory; `WHOLE` where `scope` is `whole`.
    """
    named = settings.get("workspace")
    if read_choice(settings, "scope", "workspace", SCOPES) == "whole":
        if named is not None:
            raise InvalidSettings("settings 'scope': 'whole' and 'workspace' exclude each other")
        return WHOLE
    if named is None:
        return ()
    if not isinstance(named, list) or not 0 < len(named) <= MAX_FOLDERS:
        raise InvalidSettings(
            f"setting 'workspace' is {named!r:.200}; it must be a list of 1 to {MAX_FOLDERS} "
            'absolute paths of folders, such as ["/app"]'
        )
    folders = tuple(_folder(path) for path in named)
    return WHOLE if "/" in folders else folders


def read_network(settings: JsonMap) -> bool:
    """Return whether the tests want the network that the environment has."""
    return read_flag(settings, "network", False)


def check_grading(settings: JsonMap) -> None:
    """Raise `InvalidSettings` for the first of these settings that is wrong."""
    read_workspace(settings)
    read_network(settings)


def _folder(path: object) -> str:
    is_path = isinstance(path, str) and path.startswith("/") and len(path) <= MAX_PATH_CHARACTERS
    if not isinstance(path, str) or not is_path or "\0" in path or ".." in path.split("/"):
        raise InvalidSettings(f"setting 'workspace' holds {path!r:.200}, no absolute path")
    return "/" + posixpath.normpath(path).strip("/")
