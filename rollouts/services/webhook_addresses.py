"""Which addresses webhooks may reach: a trainer must not look into our network through us.

Names are resolved for each delivery, and the connection goes to what was checked: a name that
points elsewhere a moment later is of no use.
"""

import ipaddress
from collections.abc import Iterable
from fnmatch import fnmatch
from urllib.parse import SplitResult, urlsplit

from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.resolver import ThreadedResolver
from django.conf import settings

from rollouts.exceptions import InvalidValue

MAX_URL = 500
_NAT64 = ipaddress.ip_network("64:ff9b::/96")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class AddressRefused(OSError):
    """A host is, or resolves to, an address that webhooks may not reach."""


def check_url(url: str) -> None:
    """Refuse what is no address of a receiver, or plainly a private one. Raises InvalidValue."""
    try:
        parts = urlsplit(url)
        usable = _is_plain(parts) and parts.scheme in {"http", "https"} and bool(parts.hostname)
    except ValueError:
        usable = False
    if not usable or len(url) > MAX_URL or any(not 32 < ord(each) < 127 for each in url):
        raise InvalidValue("Write the receiver's address like https://trainer.example/hooks.")
    try:
        check_literal(parts.hostname or "")
    except AddressRefused as refusal:
        raise InvalidValue(str(refusal)) from None


def _is_plain(parts: SplitResult) -> bool:
    extra = parts.username or parts.password or parts.fragment or "%" in parts.netloc
    return not extra and parts.port != 0


def check_literal(host: str) -> None:
    """Refuse a host that is written as a private address. Raises AddressRefused."""
    if _is_listed(host):
        return
    host = host.rstrip(".").lower()
    if host == "localhost" or host.endswith(".localhost"):
        raise _refusal(host)
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        if _looks_numeric(host):
            raise _refusal(host) from None
        return
    if not is_public(address):
        raise _refusal(host)


def _looks_numeric(host: str) -> bool:
    """Tell whether a resolver may read a host as an IPv4 address in another form: 0x7f.1."""
    last = host.rpartition(".")[2]
    return last.isdigit() or last.startswith("0x")


def is_public(address: Address) -> bool:
    """Tell whether an address is one of the public network, however it is wrapped."""
    return all(each.is_global and not each.is_multicast for each in _unwrapped(address))


def _unwrapped(address: Address) -> Iterable[Address]:
    """Yield an address and the IPv4 address inside it, if there is one."""
    yield address
    if isinstance(address, ipaddress.IPv6Address):
        inner = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
        if address in _NAT64:
            inner.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
        yield from (each for each in inner if each is not None)


class GuardedResolver(AbstractResolver):
    """Resolve names, and keep what webhooks may reach."""

    def __init__(self) -> None:
        self._resolver = ThreadedResolver()

    async def resolve(self, host: str, port: int = 0, family: int = 0) -> list[ResolveResult]:
        """Return the addresses of a name. Raises AddressRefused when one of them is private."""
        found = await self._resolver.resolve(host, port, family)  # type: ignore[arg-type]
        if not _is_listed(host):
            for each in found:
                if not is_public(ipaddress.ip_address(each["host"].partition("%")[0])):
                    raise _refusal(host)
        return found

    async def close(self) -> None:
        """Close the resolver."""
        await self._resolver.close()


def _is_listed(host: str) -> bool:
    return any(fnmatch(host.lower(), pattern.lower()) for pattern in settings.WEBHOOK_HOSTS)


def _refusal(host: str) -> AddressRefused:
    return AddressRefused(
        f"{host} is a private address: webhooks reach those only that an operator lists in "
        "PRORL_WEBHOOK_HOSTS."
    )
