"""What a sandbox reaches while a stage works in it, by its environment's network."""

import socket
from http.client import HTTPConnection
from types import SimpleNamespace
from typing import Any

import pytest

from rollouts.exceptions import InfraFault
from rollouts.stages import inside, network, running
from rollouts.stages.lease import Held
from rollouts.stages.network import MODEL_PORT, reachable
from rollouts.stages.running import carry_out_run
from sandboxes.models import Environment, Sandbox
from sandboxes.network.proxy import PORT, proxy_env
from sandboxes.runtime.exceptions import SandboxGone, ShellFailed
from sandboxes.runtime.fake import FakeRuntime
from sandboxes.runtime.protocol import SandboxHandle, SandboxSpec
from tests.services.line import bring_to, make_group, make_node

HOST = "127.0.0.1"
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close\r\n\r\nmodel"


class Node(FakeRuntime):
    """A node in memory; what a sandbox would reach at a port, this process does at another."""

    def __init__(self) -> None:
        super().__init__()
        self.places: dict[int, tuple[str, int]] = {}
        self.sockets: list[socket.socket] = []

    def listen(self, handle: SandboxHandle, port: int) -> socket.socket:
        server = super().listen(handle, 0)
        self.places[port] = server.getsockname()
        self.sockets.append(server)
        return server


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Node:
    made = Node()
    monkeypatch.setattr(network, "node_runtime", lambda: made)
    return made


@pytest.fixture
def handle(node: Node) -> SandboxHandle:
    return node.start(SandboxSpec(name="s", image="base"), timeout_seconds=60)


def environment(kind: str, **columns: Any) -> Environment:
    return Environment(name="e", version=1, network=kind, **columns)


def ask(place: tuple[str, int], target: str = "/") -> tuple[int, str]:
    connection = HTTPConnection(*place, timeout=60)
    try:
        connection.request("GET", target)
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


@pytest.mark.parametrize("kind", ["none", "host"])
def test_nothing_is_served_where_nothing_is_to_be(
    node: Node, handle: SandboxHandle, kind: str
) -> None:
    with reachable(handle, environment=environment(kind), model=lambda: None) as env:
        assert env == {}

    assert node.places == {}


def test_the_model_alone_is_nothing_without_a_model(node: Node, handle: SandboxHandle) -> None:
    with reachable(handle, environment=environment("model_only")) as env:
        assert env == {}

    assert node.places == {}


def test_the_model_is_reached_where_the_variables_say(node: Node, handle: SandboxHandle) -> None:
    with socket.create_server((HOST, 0)) as server:
        url = f"http://{HOST}:{server.getsockname()[1]}/ignored"
        with reachable(handle, environment=environment("model_only"), model=lambda: url) as env:
            assert env == {
                "OPENAI_BASE_URL": f"http://127.0.0.1:{MODEL_PORT}/v1",
                "OPENAI_API_KEY": "none",
            }
            with socket.create_connection(node.places[MODEL_PORT], timeout=60) as client:
                client.sendall(b"GET /v1/models HTTP/1.1\r\n\r\n")
                upstream, _ = server.accept()
                with upstream:
                    host = f"Host: {HOST}:{server.getsockname()[1]}"
                    passed = f"GET /v1/models HTTP/1.1\r\n{host}\r\nConnection: close\r\n\r\n"
                    assert upstream.recv(65536) == passed.encode()
                    upstream.sendall(ANSWER)
                assert client.recv(len(ANSWER), socket.MSG_WAITALL) == ANSWER

    assert [each.fileno() for each in node.sockets] == [-1]


@pytest.mark.parametrize("url", [None, "https://model.example.org", "unix:///run/model", ""])
def test_a_model_that_cannot_be_reached_now_is_told(
    node: Node, handle: SandboxHandle, url: str | None
) -> None:
    with reachable(handle, environment=environment("model_only"), model=lambda: url):
        told = ask(node.places[MODEL_PORT], "/v1/models")

    assert told == (503, "no model server can be reached now\n")


def test_listed_hosts_need_the_nodes_leave(
    node: Node, handle: SandboxHandle, settings: Any
) -> None:
    settings.EGRESS = False
    wide = environment("allow_list", egress_hosts=["pypi.org"])

    with pytest.raises(InfraFault) as fault, reachable(handle, environment=wide):
        pytest.fail("it was served")

    assert (fault.value.code, fault.value.retryable) == ("sandbox.egress_forbidden", False)
    assert str(fault.value) == (
        "Environment e@1 wants to reach listed hosts, and this node does not permit it: "
        "set PRORL_EGRESS=1 there, or give the environment another network."
    )
    assert node.places == {}


def test_listed_hosts_are_served_by_the_proxy_and_refusals_are_logged(
    node: Node, handle: SandboxHandle, settings: Any, caplog: pytest.LogCaptureFixture
) -> None:
    settings.EGRESS = True
    wide = environment("allow_list", egress_hosts=["pypi.org", "*.example.org:8443"])
    caplog.set_level("INFO", logger=network.__name__)

    with reachable(handle, environment=wide) as env:
        assert env == proxy_env()
        status, told = ask(node.places[PORT], "http://evil.org/")

    assert (status, told) == (403, "evil.org:80 is not among the hosts this sandbox may reach\n")
    assert caplog.messages == ["sandbox s was refused: {'evil.org:80': 1}"]
    assert [each.fileno() for each in node.sockets] == [-1]


@pytest.mark.parametrize("kind", ["allow_list", "model_only"])
def test_what_goes_wrong_inside_closes_what_was_served(
    node: Node, handle: SandboxHandle, settings: Any, kind: str
) -> None:
    settings.EGRESS = True
    with (
        pytest.raises(ZeroDivisionError),
        reachable(handle, environment=environment(kind), model=lambda: None),
    ):
        raise ZeroDivisionError

    assert [each.fileno() for each in node.sockets] == [-1]


def test_a_sandbox_that_is_gone_says_so(node: Node, handle: SandboxHandle, settings: Any) -> None:
    settings.EGRESS = True
    node.stop("s")

    with (
        pytest.raises(SandboxGone),
        reachable(handle, environment=environment("allow_list", egress_hosts=[])),
    ):
        pytest.fail("it was served")


@pytest.mark.django_db(transaction=True)
def test_a_run_that_cannot_begin_closes_what_was_served(
    node: Node, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.EGRESS = True
    workers = make_node("n1")
    group = make_group()
    Environment.objects.filter(pk=group.environment_id).update(network="allow_list")
    claim = bring_to(group.rollouts.get(), "run", workers)
    assert claim is not None
    handle = node.start(SandboxSpec(name="r", image="base"), timeout_seconds=60)
    Sandbox.objects.filter(owner=claim.rollout_id).update(state="ready", handle=handle.as_dict())
    monkeypatch.setattr(inside, "node_runtime", lambda: node)
    monkeypatch.setattr(running, "load_renderer", lambda _name: SimpleNamespace(stop_token_ids=()))
    node.fail_next("open_shell", ShellFailed("no shell came up"))

    with pytest.raises(ShellFailed):
        carry_out_run(Held(claim))

    assert [each.fileno() for each in node.sockets] == [-1]
