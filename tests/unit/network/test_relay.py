"""What the relay to model servers passes, and how it answers everything else."""

import hashlib
import queue
import random
import socket
import threading
from typing import Any

import pytest

from sandboxes.network.relay import Relay
from tests.unit.network.servers import HOST, Web, connect, read_all, refusal, talk

MODELS = b"GET /v1/models HTTP/1.1\r\n\r\n"


def test_each_request_asks_where_to_go(listening: socket.socket, serve: Any) -> None:
    def say(connection: socket.socket, word: bytes) -> None:
        connection.recv(65536)
        connection.sendall(word)

    ports = [serve(lambda c, word=word: say(c, word)) for word in (b"one", b"two")]
    places = iter([(HOST, port) for port in ports])
    with Relay(listening, lambda: next(places)):
        said = [talk(listening, MODELS) for _ in range(2)]

    assert said == [b"one", b"two"]


@pytest.mark.parametrize(
    "line", ["POST /v1/completions", "POST /v1/chat/completions", "GET /v1/models"]
)
def test_what_samples_is_passed_as_one_request(
    listening: socket.socket, web: Web, line: str
) -> None:
    body = random.Random(3).randbytes(300_000)
    head = (
        f"{line} HTTP/1.1\r\nHost: elsewhere\r\nContent-Length: {len(body)}\r\nX-Kept: yes\r\n"
        f"Connection: keep-alive\r\nKeep-Alive: 5\r\nProxy-Connection: keep-alive\r\n\r\n"
    )
    with Relay(listening, lambda: (HOST, web.server_port)):
        answer = talk(listening, head.encode() + body)

    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    path = line.partition(" ")[2]
    assert answer.endswith(f"{path} {hashlib.sha256(body).hexdigest()}".encode())
    headers = {
        "Host": web.place,
        "Connection": "close",
        "Content-Length": str(len(body)),
        "X-Kept": "yes",
    }
    assert web.seen == [(f"{line} HTTP/1.1", headers)]


@pytest.mark.parametrize(
    "line",
    [
        "POST /v1/load_lora_adapter",
        "POST /sleep?level=2",
        "POST /collective_rpc",
        "GET /v1/completions",
        "DELETE /v1/models",
        "get /v1/models",
        "GET /v1/models?x=1",
        "GET /v1/models/",
        "GET //v1/models",
        "GET /v1/%6dodels",
        "POST /v1/completions/../../sleep",
        "GET http://127.0.0.1:8080/v1/models",
        "CONNECT 127.0.0.1:8080",
    ],
)
def test_any_other_call_is_refused_and_no_server_is_asked(
    listening: socket.socket, web: Web, line: str
) -> None:
    with Relay(listening, lambda: (HOST, web.server_port)):
        answer = talk(listening, f"{line} HTTP/1.1\r\nContent-Length: 2\r\n\r\n{{}}".encode())

    why = (
        "a sandbox may call these alone: GET /v1/models, POST /v1/chat/completions, "
        "POST /v1/completions"
    )
    assert answer == refusal("403 Forbidden", why)
    assert web.seen == []


@pytest.mark.parametrize("more", ["at once", "later"])
def test_what_follows_a_request_reaches_no_server(
    listening: socket.socket, serve: Any, more: str
) -> None:
    told: queue.Queue[bytes] = queue.Queue()

    def listen(connection: socket.socket) -> None:
        told.put(read_all(connection))

    port = serve(listen)
    request = b"POST /v1/completions HTTP/1.1\r\nContent-Length: 2\r\n\r\n{"
    rest = b"}POST /sleep HTTP/1.1\r\nContent-Length: 0\r\n\r\n"
    with Relay(listening, lambda: (HOST, port)), connect(listening) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for part in [request + rest] if more == "at once" else [request, rest]:
            client.sendall(part)
        client.shutdown(socket.SHUT_WR)
        assert read_all(client) == b""

    passed = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {HOST}:{port}\r\nConnection: close\r\n"
        "Content-Length: 2\r\n\r\n{}"
    )
    assert told.get(timeout=30) == passed.encode()


@pytest.mark.parametrize(
    "headers",
    [
        "Transfer-Encoding: chunked",
        "Content-Length: 2\r\nTransfer-Encoding: chunked",
        "Content-Length: 2\r\ncontent-length: 3",
        "Content-Length: 2, 2",
        "Content-Length: -1",
        "Content-Length: +2",
        "Content-Length:",
        f"Content-Length: {'9' * 5000}",
    ],
)
def test_a_body_whose_end_is_unclear_is_refused(
    listening: socket.socket, web: Web, headers: str
) -> None:
    with Relay(listening, lambda: (HOST, web.server_port)):
        answer = talk(listening, f"POST /v1/completions HTTP/1.1\r\n{headers}\r\n\r\n{{}}".encode())

    assert answer == refusal("400 Bad Request", "send the body whole, with one Content-Length")
    assert web.seen == []


def test_what_is_no_request_is_refused(listening: socket.socket, web: Web) -> None:
    with Relay(listening, lambda: (HOST, web.server_port)):
        answers = [
            talk(listening, b"GET /v1/models HTTP/1.1\nX: y\n\nPOST /sleep HTTP/1.1\r\n\r\n"),
            talk(listening, b"hello\r\n\r\n"),
        ]

    why = "this is a model server: send an HTTP/1.1 request"
    assert answers == [refusal("400 Bad Request", why)] * 2
    assert web.seen == []


def test_an_answer_arrives_while_it_is_written(listening: socket.socket, serve: Any) -> None:
    go_on = threading.Event()

    def stream(connection: socket.socket) -> None:
        connection.recv(65536)
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\ndata: one\n\n")
        assert go_on.wait(timeout=30)
        connection.sendall(b"data: [DONE]\n\n")

    port = serve(stream)
    begin = b"HTTP/1.1 200 OK\r\n\r\ndata: one\n\n"
    with Relay(listening, lambda: (HOST, port)), connect(listening) as client:
        client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}")
        assert client.recv(len(begin), socket.MSG_WAITALL) == begin
        go_on.set()
        assert read_all(client) == b"data: [DONE]\n\n"


@pytest.mark.parametrize("kind", ["nowhere", "closed"])
def test_a_relay_without_a_server_says_so(listening: socket.socket, kind: str) -> None:
    with socket.create_server((HOST, 0)) as free:
        port = free.getsockname()[1]
    with (
        Relay(listening, lambda: None if kind == "nowhere" else (HOST, port)),
        connect(listening) as client,
    ):
        client.sendall(b"POST /v1/completions HTTP/1.1\r\n\r\n" + b"x" * 300_000)
        answer = read_all(client)

    assert answer == refusal("503 Service Unavailable", "no model server can be reached now")
