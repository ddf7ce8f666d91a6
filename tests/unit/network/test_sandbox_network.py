"""What the proxy lets through and what it refuses, on real sockets."""

import hashlib
import random
import socket
from contextlib import suppress
from typing import Any

import pytest

from sandboxes.network import request_head
from sandboxes.network.proxy import MAX_REFUSED, proxy_env
from tests.unit.network.servers import HOST, Web, connect, read_all, refusal, talk


def test_a_listed_address_is_reached_with_the_hosts_own_header(
    proxied: Any, listening: socket.socket, web: Web
) -> None:
    proxy = proxied(web.place)

    answer = talk(
        listening,
        f"GET http://user:secret@{web.place}/a;b?c=d#e HTTP/1.1\r\nHost: elsewhere.org\r\n"
        f"Proxy-Authorization: Basic eDp5\r\nProxy-Connection: keep-alive\r\nKEEP-ALIVE: 5\r\n"
        f"Connection: keep-alive\r\nX-Kept: yes\r\n\r\n".encode(),
    )

    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert answer.endswith(b"/a;b?c=d " + hashlib.sha256().hexdigest().encode())
    headers = {"Host": web.place, "Connection": "close", "X-Kept": "yes"}
    assert web.seen == [("GET /a;b?c=d HTTP/1.1", headers)]
    assert proxy.refused == {}


def test_a_body_passes_whole_and_an_old_client_stays_one(
    proxied: Any, listening: socket.socket, web: Web
) -> None:
    proxied(web.place)
    body = random.Random(1).randbytes(3_000_000)
    head = f"POST http://{web.place} HTTP/1.0\r\nContent-Length: {len(body)}\r\n\r\n"

    answer = talk(listening, head.encode() + body)

    assert answer.endswith(f"/ {hashlib.sha256(body).hexdigest()}".encode())
    assert [line for line, _headers in web.seen] == ["POST / HTTP/1.0"]


@pytest.mark.parametrize(
    ("line", "place"),
    [
        ("GET http://evil.org/x", "evil.org:80"),
        ("GET http://{web}@evil.org/", "evil.org:80"),
        ("GET http://EVIL.org.:8080/", "evil.org:8080"),
        ("GET http://127.0.0.1/", "127.0.0.1:80"),
        ("GET http://[::1]:{port}/", "::1:{port}"),
        ("GET http://[::ffff:127.0.0.1]:{port}/", "::ffff:7f00:1:{port}"),
        ("GET http://127.1:{port}/", "127.1:{port}"),
        ("CONNECT 127.0.0.2:{port}", "127.0.0.2:{port}"),
        ("CONNECT evil.org", "evil.org:443"),
        ("CONNECT b\u00fccher.example:443", "b\u00fccher.example:443"),
    ],
)
def test_what_is_not_listed_is_refused_and_counted(
    proxied: Any, listening: socket.socket, web: Web, line: str, place: str
) -> None:
    proxy = proxied(web.place, "*.example.org")
    line, place = (each.format(web=web.place, port=web.server_port) for each in (line, place))

    answer = talk(listening, f"{line} HTTP/1.1\r\n\r\n".encode("latin-1"))

    why = f"{place} is not among the hosts this sandbox may reach"
    assert answer == refusal("403 Forbidden", why)
    assert proxy.refused == {place: 1}
    assert web.seen == []


@pytest.mark.parametrize("method", ["GET http://{place}/", "CONNECT {place}"])
def test_a_listed_name_that_leads_to_a_private_address_is_refused(
    proxied: Any,
    listening: socket.socket,
    web: Web,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
) -> None:
    place = f"inside.example.org:{web.server_port}"
    proxy = proxied(place)
    lead = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (HOST, web.server_port))]
    address = listening.getsockname()
    with socket.socket() as client:
        client.settimeout(60)
        client.connect(address)
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_args, **_kwargs: lead)
        client.sendall(f"{method.format(place=place)} HTTP/1.1\r\n\r\n".encode())
        answer = read_all(client)

    why = f"{place} is not among the hosts this sandbox may reach"
    assert answer == refusal("403 Forbidden", why)
    assert proxy.refused == {place: 1}
    assert web.seen == []


@pytest.mark.parametrize("host", ["no-such-name.invalid", "a" * 64 + ".invalid", "..invalid"])
def test_a_name_that_is_not_known_is_told(
    proxied: Any, listening: socket.socket, host: str
) -> None:
    proxied("*.invalid")

    answer = talk(listening, f"CONNECT {host}:443 HTTP/1.1\r\n\r\n".encode())

    status, _, rest = answer.partition(b"\r\n")
    assert status == b"HTTP/1.1 502 Bad Gateway"
    assert f"\r\n\r\n{host} is not known: ".encode() in rest


def test_a_listed_place_where_nobody_listens_is_told(
    proxied: Any, listening: socket.socket
) -> None:
    with socket.create_server((HOST, 0)) as free:
        place = f"{HOST}:{free.getsockname()[1]}"
    proxied(place)

    answer = talk(listening, f"GET http://{place}/ HTTP/1.1\r\n\r\n".encode())

    why = f"{place} cannot be reached: [Errno 111] Connection refused"
    assert answer == refusal("502 Bad Gateway", why)


@pytest.mark.parametrize(
    ("head", "why"),
    [
        (b"GET / HTTP/1.1", "only http:// addresses and CONNECT are served"),
        (b"GET https://pypi.org/ HTTP/1.1", "only http:// addresses and CONNECT are served"),
        (b"GET http:/// HTTP/1.1", "only http:// addresses and CONNECT are served"),
        (b"GET file:///etc/passwd HTTP/1.1", "only http:// addresses and CONNECT are served"),
        (b"GET http://[::1/ HTTP/1.1", "the address cannot be understood"),
        (b"GET http://[x]/ HTTP/1.1", "the address cannot be understood"),
        (b"GET http://user@/ HTTP/1.1", "the address is not host:port"),
        (b"GET http://pypi.org:0/ HTTP/1.1", "the address is not host:port"),
        (b"CONNECT pypi.org:65536 HTTP/1.1", "the address is not host:port"),
        (b"CONNECT :443 HTTP/1.1", "the address is not host:port"),
        (b"CONNECT  HTTP/1.1", "the address is not host:port"),
        (b"", "this is an HTTP proxy: send an HTTP/1.1 request"),
        (b"GET http://pypi.org/", "this is an HTTP proxy: send an HTTP/1.1 request"),
        (b"GET http://pypi.org/ HTTP/2", "this is an HTTP proxy: send an HTTP/1.1 request"),
        (b"GET http://pypi.org/ HTTP/1.1x", "this is an HTTP proxy: send an HTTP/1.1 request"),
        (b"GET http://pypi.org/ HTTP/1.12", "this is an HTTP proxy: send an HTTP/1.1 request"),
        (
            b"GET http://pypi.org/ HTTP/1.1\nHost:evil\n\nPOST\t/second\tHTTP/1.1\nHost:evil",
            "this is an HTTP proxy: send an HTTP/1.1 request",
        ),
        (b"\x16\x03\x01\x02\x00\xff\xfe", "this is an HTTP proxy: send an HTTP/1.1 request"),
        (bytes(range(256)), "this is an HTTP proxy: send an HTTP/1.1 request"),
    ],
)
def test_what_is_no_request_for_a_proxy_is_refused(
    proxied: Any, listening: socket.socket, head: bytes, why: str
) -> None:
    proxied("pypi.org")

    assert talk(listening, head + b"\r\n\r\n") == refusal("400 Bad Request", why)


@pytest.mark.parametrize(
    "header",
    [
        *(b"X: a" + bytes([each]) + b"b" for each in (0, 8, 10, 11, 12, 13, 27, 31, 127)),
        *(b"X: a\nConnection: keep-alive", b"X: a\n\nGET /second HTTP/1.1"),
        *(b"Connection : keep-alive", b" folded", b"no colon", b": no name"),
    ],
)
def test_a_header_that_others_could_read_in_another_way_is_refused(
    proxied: Any, listening: socket.socket, web: Web, header: bytes
) -> None:
    proxied(web.place)

    answer = talk(
        listening, f"GET http://{web.place}/ HTTP/1.1\r\n".encode() + header + b"\r\n\r\n"
    )

    why = "this is an HTTP proxy: send an HTTP/1.1 request"
    assert answer == refusal("400 Bad Request", why)
    assert web.seen == []


def test_a_header_may_hold_tabs_and_other_alphabets_and_may_be_empty(
    proxied: Any, listening: socket.socket, web: Web
) -> None:
    proxied(web.place)
    headers = "X-Tab: a\tb\r\nX-Letter: \u00e9\r\nX-Nothing:"

    talk(listening, f"GET http://{web.place}/ HTTP/1.1\r\n{headers}\r\n\r\n".encode("latin-1"))

    [(_line, seen)] = web.seen
    assert [seen[name] for name in ("X-Tab", "X-Letter", "X-Nothing")] == ["a\tb", "\u00e9", ""]


def test_a_client_that_ends_within_the_head_is_told_so(
    proxied: Any, listening: socket.socket
) -> None:
    proxied("pypi.org")
    with connect(listening) as client:
        client.sendall(b"GET http://pypi.org/ HTTP/1.1\r\n")
        client.shutdown(socket.SHUT_WR)
        answer = read_all(client)

    why = "this is an HTTP proxy: send an HTTP/1.1 request"
    assert answer == refusal("400 Bad Request", why)


def test_a_head_without_end_is_cut_off(proxied: Any, listening: socket.socket, web: Web) -> None:
    proxied(web.place)
    start = f"GET http://{web.place}/ HTTP/1.1\r\nX: ".encode()
    with connect(listening) as client:
        client.sendall(start)
        sent = 0
        with suppress(ConnectionError):  # the proxy goes while we still send
            while sent < 64 * 1024 * 1024:
                sent += client.send(b"x" * 65536)

    assert sent < 64 * 1024 * 1024
    assert web.seen == []


def test_a_client_that_says_too_much_is_told_why_all_the_same(
    proxied: Any, listening: socket.socket, web: Web
) -> None:
    proxied(web.place)
    much = b"x" * 300_000

    head = talk(listening, b"GET http://pypi.org/ HTTP/1.1\r\nX: " + much)
    body = talk(listening, b"POST http://pypi.org/ HTTP/1.1\r\n\r\n" + much)

    why = "this is an HTTP proxy: send an HTTP/1.1 request"
    assert head == refusal("400 Bad Request", why)
    why = "pypi.org:80 is not among the hosts this sandbox may reach"
    assert body == refusal("403 Forbidden", why)
    assert web.seen == []


def test_a_head_may_come_byte_by_byte(proxied: Any, listening: socket.socket, web: Web) -> None:
    proxied(web.place)
    with connect(listening) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in f"GET http://{web.place}/slow HTTP/1.1\r\n\r\n".encode():
            client.sendall(bytes([byte]))
        answer = read_all(client)

    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert [line for line, _headers in web.seen] == ["GET /slow HTTP/1.1"]


def test_a_head_that_never_ends_takes_no_longer_for_coming_in_drops(
    proxied: Any, listening: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_head, "HEAD_SECONDS", 0.3)
    proxied("pypi.org")
    with connect(listening) as silent, connect(listening) as dripping:
        silent.sendall(b"GET ")
        dripping.settimeout(0.02)
        ended = False
        for _ in range(2000):
            try:
                dripping.sendall(b"x")
                ended = dripping.recv(1) == b""
            except TimeoutError:
                continue
            except ConnectionError:
                ended = True
            if ended:
                break

        assert ended
        assert read_all(silent) == b""


def test_a_sandbox_that_asks_for_ever_new_hosts_fills_no_memory(
    proxied: Any, listening: socket.socket
) -> None:
    proxy = proxied("pypi.org")
    for number in range(MAX_REFUSED + 20):
        talk(listening, f"CONNECT h{number}.org:1 HTTP/1.1\r\n\r\n".encode())
    talk(listening, b"CONNECT h0.org:1 HTTP/1.1\r\n\r\n")

    assert len(proxy.refused) == MAX_REFUSED
    assert (proxy.refused["h0.org:1"], proxy.refused[f"h{MAX_REFUSED - 1}.org:1"]) == (2, 1)


def test_a_refused_name_is_kept_in_part_when_it_is_long(
    proxied: Any, listening: socket.socket
) -> None:
    proxy = proxied("pypi.org")
    name = "a" * 50_000

    answer = talk(listening, f"CONNECT {name}:1 HTTP/1.1\r\n\r\n".encode())

    assert answer.startswith(b"HTTP/1.1 403 Forbidden\r\n")
    assert proxy.refused == {f"{'a' * 253}:1": 1}


def test_the_variables_that_lead_to_the_proxy() -> None:
    url = "http://127.0.0.1:3128"
    assert proxy_env() == {
        "http_proxy": url,
        "https_proxy": url,
        "HTTP_PROXY": url,
        "HTTPS_PROXY": url,
        "no_proxy": "127.0.0.1,localhost",
    }
