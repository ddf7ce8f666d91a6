"""Tunnels, many connections at once, and their end."""

import hashlib
import queue
import random
import socket
import struct
import threading
from contextlib import ExitStack, suppress
from typing import Any

import pytest

from sandboxes.network import proxy as proxy_module
from sandboxes.network import streams
from sandboxes.network.allow_list import Pattern, parse_pattern
from sandboxes.network.proxy import AllowListProxy
from tests.unit.network.servers import (
    ESTABLISHED,
    HOST,
    Web,
    answer_at_the_end,
    connect,
    echo,
    read_all,
    refusal,
    tunnel,
)

RESET = struct.pack("ii", 1, 0)  # of SO_LINGER: closing resets


def test_a_tunnel_carries_much_both_ways_at_once(
    proxied: Any, listening: socket.socket, serve: Any
) -> None:
    place = f"{HOST}:{serve(echo)}"
    proxied(place)
    sent = random.Random(2).randbytes(16 * 1024 * 1024)
    with tunnel(listening, place) as client:

        def send() -> None:
            client.sendall(sent)
            client.shutdown(socket.SHUT_WR)

        sender = threading.Thread(target=send)
        sender.start()
        got = read_all(client)
        sender.join()

    assert hashlib.sha256(got).digest() == hashlib.sha256(sent).digest()


def test_half_a_tunnel_can_be_closed(proxied: Any, listening: socket.socket, serve: Any) -> None:
    place = f"{HOST}:{serve(answer_at_the_end)}"
    proxied(place)
    with tunnel(listening, place) as client:
        client.sendall(b"abc")
        client.shutdown(socket.SHUT_WR)
        got = read_all(client)

    assert got == f"3 {hashlib.sha256(b'abc').hexdigest()}".encode()


def test_a_client_may_go_on_after_the_other_side_has_said_all(
    proxied: Any, listening: socket.socket, serve: Any
) -> None:
    told: queue.Queue[bytes] = queue.Queue()

    def say_then_listen(connection: socket.socket) -> None:
        connection.sendall(b"go on")
        connection.shutdown(socket.SHUT_WR)
        told.put(read_all(connection))

    place = f"{HOST}:{serve(say_then_listen)}"
    proxied(place)
    with tunnel(listening, place) as client:
        assert read_all(client) == b"go on"
        client.sendall(b"and so I do")

    assert told.get(timeout=30) == b"and so I do"


def test_what_comes_right_after_the_head_is_part_of_the_tunnel(
    proxied: Any, listening: socket.socket, serve: Any
) -> None:
    place = f"{HOST}:{serve(answer_at_the_end)}"
    proxied(place)
    with connect(listening) as client:
        client.sendall(f"CONNECT {place} HTTP/1.1\r\n\r\nearly".encode())
        client.shutdown(socket.SHUT_WR)
        got = read_all(client)

    assert got == ESTABLISHED + f"5 {hashlib.sha256(b'early').hexdigest()}".encode()


def test_an_upstream_that_resets_ends_the_tunnel(
    proxied: Any, listening: socket.socket, serve: Any
) -> None:
    def reset(connection: socket.socket) -> None:
        connection.recv(1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)

    place = f"{HOST}:{serve(reset)}"
    proxied(place)
    with tunnel(listening, place) as client:
        client.sendall(b"x")

        assert read_all(client) == b""


def test_a_client_that_goes_while_it_is_connected_leaves_nothing(
    proxied: Any, listening: socket.socket, serve: Any
) -> None:
    ended = threading.Event()

    def wait_for_the_end(connection: socket.socket) -> None:
        with suppress(ConnectionError):
            assert connection.recv(1) == b""
        ended.set()

    port = serve(wait_for_the_end)
    client = connect(listening)

    class Leaving(Pattern):
        def allows(self, *_: object) -> bool:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            client.close()
            return True

    proxied(Leaving(HOST, frozenset({port})))
    client.sendall(f"CONNECT {HOST}:{port} HTTP/1.1\r\n\r\n".encode())

    assert ended.wait(timeout=30)


def test_a_long_answer_is_no_silence(
    proxied: Any, listening: socket.socket, serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxy_module, "IDLE_SECONDS", 1.0)
    ends: list[bytes] = []

    def speak_alone(connection: socket.socket) -> None:
        connection.settimeout(0.1)  # the pace of the answer: 2.5 idle times in all
        for _ in range(25):
            connection.sendall(b"x")
            with suppress(TimeoutError):
                ends.append(connection.recv(1))
                return

    place = f"{HOST}:{serve(speak_alone)}"
    proxied(place)
    with tunnel(listening, place) as client:
        assert read_all(client) == b"x" * 25

    assert ends == []


def test_a_silent_tunnel_is_ended(
    proxied: Any, listening: socket.socket, serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxy_module, "IDLE_SECONDS", 0.1)
    place = f"{HOST}:{serve(lambda connection: connection.recv(1))}"
    proxied(place)

    with tunnel(listening, place) as client:
        assert read_all(client) == b""


def test_two_hundred_connections_at_once_are_all_served(
    proxied: Any, listening: socket.socket, web: Web
) -> None:
    proxied(web.place)
    with ExitStack() as stack:
        clients = [stack.enter_context(connect(listening)) for _ in range(200)]
        for number, client in enumerate(clients):
            client.sendall(f"GET http://{web.place}/{number} HTTP/1.1\r\n\r\n".encode())
        answers = [read_all(client) for client in clients]

    empty = hashlib.sha256().hexdigest()
    bodies = [answer.partition(b"\r\n\r\n")[2].decode() for answer in answers]
    assert bodies == [f"/{number} {empty}" for number in range(200)]
    assert len(web.seen) == 200


def test_closing_ends_every_connection(listening: socket.socket, serve: Any) -> None:
    place = f"{HOST}:{serve(echo)}"
    with ExitStack() as stack:
        with AllowListProxy(listening, [parse_pattern(place)]):
            tunnels = [stack.enter_context(tunnel(listening, place)) for _ in range(10)]
            waiting = [stack.enter_context(connect(listening)) for _ in range(20)]
            waiting[0].sendall(b"GET http://")
            for each in tunnels:
                each.sendall(b"there")
                assert each.recv(5, socket.MSG_WAITALL) == b"there"

        for each in (*tunnels, *waiting):
            with suppress(ConnectionResetError):
                assert each.recv(1) in (b"", b"H")  # the end, or the beginning of a refusal
        assert listening.fileno() == -1


def test_closing_does_not_wait_for_a_free_place(
    listening: socket.socket, serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "MAX_CONNECTIONS", 2)
    place = f"{HOST}:{serve(echo)}"
    with ExitStack() as stack:
        with AllowListProxy(listening, [parse_pattern(place)]):
            full = [stack.enter_context(tunnel(listening, place)) for _ in range(2)]
            third = stack.enter_context(connect(listening))
            third.sendall(b"GET / HTTP/1.1\r\n\r\n")

        for each in (*full, third):
            with suppress(ConnectionResetError):
                assert read_all(each) == b""


def test_closing_does_not_wait_for_names_that_are_looked_up(
    listening: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    looking, answer = threading.Semaphore(0), threading.Event()

    def look_up(*_args: object, **_kwargs: object) -> list[Any]:
        looking.release()
        assert answer.wait(timeout=60)
        raise socket.gaierror("no answer")

    place = listening.getsockname()
    proxy = AllowListProxy(listening, [parse_pattern("*.slow.example")])
    with ExitStack() as stack:
        clients = []
        for _ in range(streams.MAX_CONNECTIONS + 1):
            client = stack.enter_context(socket.socket())
            client.settimeout(60)
            client.connect(place)
            client.sendall(b"CONNECT x.slow.example:443 HTTP/1.1\r\n\r\n")
            clients.append(client)
        monkeypatch.setattr(socket, "getaddrinfo", look_up)
        stack.callback(answer.set)
        proxy.__enter__()
        for _ in range(streams.MAX_CONNECTIONS):
            assert looking.acquire(timeout=30)

        closing = threading.Thread(target=proxy.close)
        closing.start()
        closing.join(timeout=15)

        assert not closing.is_alive()
        assert not looking.acquire(blocking=False)
        answer.set()
        for each in clients:
            with suppress(ConnectionResetError):
                assert read_all(each) == b""


def test_the_third_of_two_places_waits_for_the_first(
    proxied: Any, listening: socket.socket, serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "MAX_CONNECTIONS", 2)
    place = f"{HOST}:{serve(echo)}"
    proxied(place)
    with ExitStack() as stack:
        first, _second = (stack.enter_context(tunnel(listening, place)) for _ in range(2))
        third = stack.enter_context(connect(listening))
        third.sendall(b"GET / HTTP/1.1\r\n\r\n")
        first.close()

        why = "only http:// addresses and CONNECT are served"
        assert read_all(third) == refusal("400 Bad Request", why)
