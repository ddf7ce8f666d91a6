"""What an image's source text means; the only place where one is read.

A source is one of: an absolute path or one relative to the node's image root (a SIF file, an
unpacked image, a folder with a root file system); `docker://`, `oras://` or `library://` and a
reference; `definition:` (the definition file is stored with the image); `template:` (a template
stored with the image) or `template:NAME` (a shipped one).
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sandboxes.images.exceptions import ReferenceInvalid

Kind = Literal["path", "docker", "oras", "library", "definition", "template"]

REMOTE: tuple[Kind, ...] = ("docker", "oras", "library")
DEFAULT_REGISTRY = "docker.io"
MAX_SOURCE = 500

# https://github.com/distribution/reference: host, path, tag and digest.
_HOST = r"(?:[a-zA-Z0-9](?:[a-zA-Z0-9.-]*[a-zA-Z0-9])?|\[[0-9a-fA-F:]+\])(?::[0-9]{1,5})?"
_WORD = r"[a-z0-9]+(?:(?:\.|_{1,2}|-+)[a-z0-9]+)*"
_REFERENCE = re.compile(
    rf"(?:(?P<host>{_HOST})/)?(?P<path>{_WORD}(?:/{_WORD})*)"
    r"(?::[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(?:@sha256:[0-9a-f]{64})?"
)
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_TEMPLATE = re.compile(r"[a-z][a-z0-9_-]{0,39}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


@dataclass(frozen=True, kw_only=True)
class Source:
    """Hold a source that was read: `value` is a path, a reference, or a template's name."""

    kind: Kind
    value: str

    @property
    def text(self) -> str:
        """Return the source as it is written: for the engine, for people, for keys."""
        if self.kind in REMOTE:
            return f"{self.kind}://{self.value}"
        return self.value if self.kind == "path" else f"{self.kind}:{self.value}"

    @property
    def registry(self) -> str:
        """Return host and port that a remote reference is pulled from."""
        return registry_of(self.value) or DEFAULT_REGISTRY


def parse_source(text: str) -> Source:
    """Return what a source text means; raises ReferenceInvalid."""
    if not text or len(text) > MAX_SOURCE or text != text.strip() or _CONTROL.search(text):
        raise ReferenceInvalid(f"not an image source: {text[:MAX_SOURCE]!r}")
    if text in ("definition:", "template:"):
        return Source(kind="definition" if text == "definition:" else "template", value="")
    if text.startswith("template:"):
        return Source(kind="template", value=_template(text.removeprefix("template:")))
    scheme = _SCHEME.fullmatch(text)
    if scheme is not None:
        return _remote(scheme[1], scheme[2])
    if text.startswith("-") or ".." in Path(text).parts:
        raise ReferenceInvalid(f"a path here neither begins with '-' nor holds '..': {text!r}")
    return Source(kind="path", value=text)


def locate(source: Source, image_root: Path) -> Source:
    """Return a path source with its absolute path; any other one as it is."""
    return (
        Source(kind="path", value=str(image_root / source.value))
        if source.kind == "path"
        else source
    )


def registry_of(reference: str) -> str:
    """Return the host (and port) that a reference names; empty when it names none."""
    found = _REFERENCE.fullmatch(reference)
    host = found["host"] if found else None
    # docker's rule: without a dot or a port the first word is part of the path.
    if not host or not (set(host) & {".", ":"} or host == "localhost"):
        return ""
    return str(host)


def is_plain_http(registry: str, insecure: Collection[str]) -> bool:
    """Tell whether a registry is reached without TLS: one of this machine, or a listed one."""
    host = registry.rpartition(":")[0] if re.search(r":\d+$", registry) else registry
    if registry in insecure or host in insecure or host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _remote(scheme: str, rest: str) -> Source:
    for kind in REMOTE:
        if scheme == kind:
            if not _REFERENCE.fullmatch(rest):
                raise ReferenceInvalid(f"not a {kind} reference: {rest!r}")
            return Source(kind=kind, value=rest)
    known = ", ".join(f"{kind}://" for kind in REMOTE)
    raise ReferenceInvalid(f"unknown kind of source {scheme!r}: write a path or one of {known}")


def _template(name: str) -> str:
    if not _TEMPLATE.fullmatch(name):
        raise ReferenceInvalid(f"not a template's name: {name!r}")
    return name
