"""Which hosts a sandbox may reach: entries of the list, and the addresses that names lead to."""

import socket
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandboxes.network.allow_list import (
    InvalidPattern,
    Pattern,
    parse_pattern,
    resolve,
    split_target,
)

WEB = frozenset({80, 443})


@pytest.mark.parametrize(
    ("text", "host", "ports"),
    [
        ("pypi.org", "pypi.org", WEB),
        (" PyPI.org. ", "pypi.org", WEB),
        ("*.Example.org", "*.example.org", WEB),
        ("*.example.org:8443", "*.example.org", {8443}),
        ("10.0.0.5:8443", "10.0.0.5", {8443}),
        ("2001:DB8::0:1", "2001:db8::1", WEB),
        ("[2001:db8:0::1]", "2001:db8::1", WEB),
        ("[2001:db8::1]:65535", "2001:db8::1", {65535}),
        ("localhost:1", "localhost", {1}),
        ("xn--bcher-kva.example", "xn--bcher-kva.example", WEB),
        ("_dmarc.example.org", "_dmarc.example.org", WEB),
    ],
)
def test_an_entry_is_read(text: str, host: str, ports: set[int]) -> None:
    assert parse_pattern(text) == Pattern(host, frozenset(ports))


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "*", "*.", ".", "a..b", "-a.org", "*.*.org", "a.*.org", "a b.org", "a/b"),
        *("http://pypi.org", "user@pypi.org", "pypi.org:", "pypi.org:x", "pypi.org:123456"),
        *("pypi.org:0", "pypi.org:65536", ":80", "[::1", "[]:80", "1::2::3", "b\u00fccher.example"),
        *("a" * 64 + ".org", "pypi.org\nevil.org", "pypi.org\0", "\u0661.org:\u0661"),
    ],
)
def test_what_is_no_entry_is_refused(text: str) -> None:
    with pytest.raises(InvalidPattern):
        parse_pattern(text)


@pytest.mark.parametrize("value", [None, 7, b"pypi.org", ["pypi.org"], {}])
def test_what_is_no_text_is_refused(value: object) -> None:
    with pytest.raises(InvalidPattern, match="write it as text"):
        parse_pattern(value)


@given(
    st.one_of(
        st.text(),
        st.text(alphabet="a0.*:[]-_%@/ \t\n", max_size=20),
        st.from_regex(r"\[?[0-9a-f:.%]*\]?(:[0-9]*)?"),
    )
)
def test_any_text_is_an_entry_or_is_refused(text: str) -> None:
    try:
        pattern = parse_pattern(text)
    except InvalidPattern:
        return
    assert pattern.host
    assert pattern.host == pattern.host.lower()
    assert all(0 < port < 65536 for port in pattern.ports)


@given(st.text(), st.integers(1, 65535))
def test_any_target_is_read_or_is_none(text: str, port: int) -> None:
    target = split_target(text, port)
    assert target is None or (target[0] != "" and 0 < target[1] < 65536)


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("Example.ORG.:8080", ("example.org", 8080)),
        ("example.org", ("example.org", 443)),
        ("[::0:1]:80", ("::1", 80)),
        ("::1", ("::1", 443)),
        ("", None),
        (":80", None),
        ("example.org:0", None),
        ("example.org:65536", None),
    ],
)
def test_a_target_is_read(text: str, target: tuple[str, int] | None) -> None:
    assert split_target(text, 443) == target


@pytest.mark.parametrize(
    ("entry", "host", "port", "allowed"),
    [
        ("example.org", "example.org", 443, True),
        ("example.org", "example.org", 8080, False),
        ("example.org", "www.example.org", 443, False),
        ("example.org", "example.org.evil.com", 443, False),
        ("*.example.org", "www.example.org", 80, True),
        ("*.example.org", "a.b.example.org", 80, True),
        ("*.example.org", "example.org", 80, False),
        ("*.example.org", ".example.org", 80, False),
        ("*.example.org", "evilexample.org", 80, False),
        ("*.0.0.1", "127.0.0.1", 80, False),
        ("example.org:8443", "example.org", 443, False),
        ("example.org:8443", "example.org", 8443, True),
        ("::1", "::1", 80, True),
    ],
)
def test_what_an_entry_allows(entry: str, host: str, port: int, allowed: bool) -> None:
    assert parse_pattern(entry).allows(host, port) is allowed


def pointed_at(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> list[Any]:
    """Let every name lead to these addresses; returns the names that are asked for."""
    asked: list[Any] = []

    def found(host: str, port: int, **_: Any) -> list[Any]:
        asked.append((host, port))
        kinds = [socket.AF_INET6 if ":" in each else socket.AF_INET for each in addresses]
        return [
            (kind, socket.SOCK_STREAM, 6, "", (address, port))
            for kind, address in zip(kinds, addresses, strict=True)
        ]

    monkeypatch.setattr(socket, "getaddrinfo", found)
    return asked


def test_a_name_leads_to_public_addresses_only(monkeypatch: pytest.MonkeyPatch) -> None:
    private = [
        *("127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "0.0.0.0"),
        *("100.64.0.1", "224.0.0.1", "255.255.255.255", "::1", "::", "fe80::1%eth0", "fd00::1"),
        *("fec0::1", "ff0e::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "2002:7f00:1::"),
        *("::7f00:1", "64:ff9b::7f00:1"),
    ]
    pointed_at(monkeypatch, *private, "93.184.216.34", "93.184.216.34", "2606:2800:220:1::1")

    found = resolve([parse_pattern("example.org")], "example.org", 443)

    assert found == ["93.184.216.34", "2606:2800:220:1::1"]


def test_a_name_that_is_not_listed_is_not_even_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = pointed_at(monkeypatch, "93.184.216.34")
    patterns = [parse_pattern("example.org"), parse_pattern("*.example.net:8443")]

    assert resolve(patterns, "example.com", 443) == []
    assert resolve(patterns, "a.example.net", 443) == []
    assert asked == []
    assert resolve(patterns, "a.example.net", 8443) == ["93.184.216.34"]
    assert asked == [("a.example.net", 8443)]


def test_a_private_address_that_is_listed_by_itself_is_reached() -> None:
    assert resolve([parse_pattern("127.0.0.1:8080")], "127.0.0.1", 8080) == ["127.0.0.1"]
    assert resolve([parse_pattern("::1")], "::1", 80) == ["::1"]
    assert resolve([parse_pattern("127.0.0.1:8080")], "127.0.0.2", 8080) == []


@pytest.mark.parametrize("spelt", ["127.1", "2130706433", "0x7f000001", "017700000001"])
def test_another_spelling_of_an_address_is_a_name_and_leads_nowhere(spelt: str) -> None:
    assert resolve([parse_pattern(spelt)], spelt, 80) == []


@pytest.mark.parametrize("host", ["a" * 64 + ".example.org", "..example.org"])
def test_what_cannot_be_a_name_is_an_unknown_one(host: str) -> None:
    with pytest.raises(OSError, match="it is no name"):
        resolve([parse_pattern("*.example.org")], host, 80)
