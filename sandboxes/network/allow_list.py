"""Which hosts a sandbox may reach: patterns, and the addresses that they may lead to."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass

DEFAULT_PORTS = frozenset({80, 443})
_NAME = re.compile(r"(?:\*\.)?(?:[a-z0-9_](?:[a-z0-9_-]{0,62})\.)*[a-z0-9_][a-z0-9_-]{0,62}")


class InvalidPattern(ValueError):
    """Say which entry of an allow-list cannot be understood."""


@dataclass(frozen=True)
class Pattern:
    """One entry: a name (`*.` in front: all names below it) or an address, and its ports."""

    host: str
    ports: frozenset[int]

    @property
    def is_address(self) -> bool:
        """Tell whether the entry is an IP address."""
        return _address(self.host) is not None

    def allows(self, host: str, port: int) -> bool:
        """Tell whether a host and port fall under the entry."""
        if port not in self.ports:
            return False
        if self.host.startswith("*."):
            below = host.endswith(self.host[1:]) and len(host) > len(self.host) - 1
            return below and _address(host) is None
        return host == self.host


def parse_pattern(text: object) -> Pattern:
    """Read `name`, `*.name`, an IP address, or one of these with `:port`. Raises InvalidPattern."""
    if not isinstance(text, str):
        raise InvalidPattern(f"{text!r} is not a host: write it as text")
    host, port = _split(text.strip().lower())
    if _address(host) is None and not _NAME.fullmatch(host):
        raise InvalidPattern(f"{text!r} is not a host such as pypi.org, *.example.org or 10.0.0.5")
    return Pattern(host, DEFAULT_PORTS if port is None else frozenset({port}))


def _split(text: str) -> tuple[str, int | None]:
    match = re.fullmatch(r"(?:\[([0-9a-f:.]+)\]|([^:\[\]]*))(?::([0-9]{1,5}))?", text)
    if match is None:
        return str(_address(text) or text), None
    port = int(match[3]) if match[3] else None
    if port is not None and not 0 < port < 65536:
        raise InvalidPattern(f"{text!r}: a port is 1 to 65535")
    host = (match[1] or match[2]).removesuffix(".")
    return str(_address(host) or host), port


def split_target(text: str, default_port: int) -> tuple[str, int] | None:
    """Read `host:port` as a client sends it; None when it is neither."""
    try:
        host, port = _split(text.strip().lower())
    except InvalidPattern:
        return None
    return (host, port or default_port) if host else None


def resolve(patterns: Sequence[Pattern], host: str, port: int) -> list[str]:
    """Return the addresses that a sandbox may be connected with; none when it may not.

    A name leads to public addresses only, so that a listed name which somebody points at the
    machine itself or into its network leads nowhere; an address may be listed by itself. Raises
    OSError when the name is not known.
    """
    if not any(pattern.allows(host, port) for pattern in patterns):
        return []
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError:
        raise OSError("it is no name") from None
    addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
    if _address(host) is not None:
        return addresses
    return [each for each in addresses if _is_public(each)]


def _is_public(text: str) -> bool:
    """Tell whether an address is one of the internet's; addresses that hold another count as it."""
    address = ipaddress.ip_address(text.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        if address.is_site_local:
            return False
        address = address.ipv4_mapped or address.sixtofour or address
    return address.is_global and not (address.is_multicast or address.is_reserved)


def _address(text: str) -> object | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None
