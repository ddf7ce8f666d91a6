"""What an evaluator's child process is told of its service, beside the request.

The child gets no environment but this: no credentials of the service's, and no Django settings.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch

# The runner kills first; the alarm that `remaining_seconds` reads comes after it.
MARGIN_SECONDS = 3.0

_PLUG_INS = "PRORL_EVALUATORS"
_PATH = "PRORL_EVALUATOR_PATH"
_JUDGE_HOSTS = "PRORL_JUDGE_HOSTS"
_JUDGE_CACHE = "PRORL_JUDGE_CACHE"
_JUDGE_CACHE_BYTES = "PRORL_JUDGE_CACHE_BYTES"

_told: dict[str, str] = {}


@dataclass(frozen=True, kw_only=True)
class Judges:
    """Which hosts may judge, and where votes are kept: `cache` is None when they are not."""

    hosts: tuple[str, ...] = ()
    cache: str | None = None
    cache_bytes: int = 0

    def allow(self, host: str) -> bool:
        """Tell whether a host may be asked; without patterns every one may."""
        return not self.hosts or any(fnmatch(host, pattern) for pattern in self.hosts)


def configure_children(
    *, judge_hosts: Sequence[str], judge_cache: str, judge_cache_bytes: int
) -> None:
    """Say what children started from now on are told of judges."""
    _told[_JUDGE_HOSTS] = ",".join(judge_hosts)
    _told[_JUDGE_CACHE] = judge_cache
    _told[_JUDGE_CACHE_BYTES] = str(judge_cache_bytes)


def child_environment() -> dict[str, str]:
    """Return the variables that tell a child of plug-ins and judges."""
    from evaluators.registry import EVALUATORS  # it lists what imports this module

    return {
        **_told,
        _PLUG_INS: ",".join(EVALUATORS.paths),
        _PATH: os.pathsep.join(sys.path),
    }


def take_environment(environ: Mapping[str, str]) -> None:
    """Take over, in a child, what its service knows: where modules are, and the plug-ins."""
    from evaluators.registry import EVALUATORS  # it lists what imports this module

    for folder in environ.get(_PATH, "").split(os.pathsep):
        if folder and folder not in sys.path:
            sys.path.append(folder)
    EVALUATORS.configure([path for path in environ.get(_PLUG_INS, "").split(",") if path])
    _told.update({name: environ[name] for name in _JUDGES if name in environ})


_JUDGES = (_JUDGE_HOSTS, _JUDGE_CACHE, _JUDGE_CACHE_BYTES)


def judges() -> Judges:
    """Return what this process was told of judges."""
    size = int(_told.get(_JUDGE_CACHE_BYTES, "0"))
    return Judges(
        hosts=tuple(host for host in _told.get(_JUDGE_HOSTS, "").split(",") if host),
        cache=_told.get(_JUDGE_CACHE) if size else None,
        cache_bytes=size,
    )


def remaining_seconds() -> float | None:
    """Return how long this child may still work before it is killed; None: it is no child."""
    alarm = signal.getitimer(signal.ITIMER_REAL)[0]
    return max(0.0, alarm - MARGIN_SECONDS) if alarm else None
