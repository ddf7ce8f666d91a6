"""What of a definition file concerns us: where it starts from, and what cannot work here.

Format: https://apptainer.org/docs/user/latest/definition_files.html
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from sandboxes.images.exceptions import ImageBuildFailed
from sandboxes.images.references import DEFAULT_REGISTRY, is_plain_http, registry_of

BOOTSTRAPS = frozenset(
    {"docker", "oras", "library", "localimage", "oci", "oci-archive", "docker-archive", "scratch"}
)
_NETWORK = frozenset({"docker", "oras", "library"})
_HEADER = re.compile(r"([A-Za-z]+)[ \t]*:[ \t]*(.*?)[ \t]*")
_STAGE_START = "bootstrap"


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Hold what one stage of a definition starts from."""

    bootstrap: str
    origin: str


def read_stages(definition: str) -> list[Stage]:
    """Return the stages of a definition; raises ImageBuildFailed when it has no header."""
    headers: list[dict[str, str]] = []
    in_section = False
    for line in definition.splitlines():
        text = line.split("#", 1)[0].strip()
        found = _HEADER.fullmatch(text)
        key = found[1].lower() if found else ""
        if key == _STAGE_START and not line[:1].isspace():
            headers.append({})
            in_section = False
        elif line.startswith("%"):
            in_section = True
        if found and headers and not in_section:
            headers[-1][key] = found[2]
    if not headers:
        raise ImageBuildFailed("a definition begins with 'Bootstrap: …'")
    return [
        Stage(bootstrap=header["bootstrap"].lower(), origin=header.get("from", ""))
        for header in headers
    ]


def check_stages(stages: Collection[Stage]) -> None:
    """Raise ImageBuildFailed for what needs a real root, or does not say where it starts."""
    for stage in stages:
        if stage.bootstrap not in BOOTSTRAPS:
            raise ImageBuildFailed(
                f"Bootstrap: {stage.bootstrap} needs a real root, which builds here never have; "
                f"start from one of: {', '.join(sorted(BOOTSTRAPS))}"
            )
        if stage.bootstrap != "scratch" and not stage.origin:
            raise ImageBuildFailed(f"Bootstrap: {stage.bootstrap} needs a line 'From: …'")


def wants_plain_http(stages: Collection[Stage], insecure: Collection[str]) -> bool:
    """Tell whether a build reaches a registry without TLS; raises ImageBuildFailed for a mix.

    The engine knows one switch for the whole build.
    """
    registries = [
        registry_of(stage.origin.removeprefix("//")) or DEFAULT_REGISTRY
        for stage in stages
        if stage.bootstrap in _NETWORK
    ]
    plain = {is_plain_http(registry, insecure) for registry in registries}
    if len(plain) > 1:
        raise ImageBuildFailed("one build cannot use registries with and without TLS")
    return plain == {True}
