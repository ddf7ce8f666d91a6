"""Pause, abort, queue limits and the prefix cache of the model server, steered over HTTP."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from tests.unit.inference.conftest import CACHE, module_process
from tests.unit.inference.test_tiny_server_http import PROMPT, wait_for_load
from tests.unit.inference.test_tiny_server_streams import events

ENDLESS = {
    "prompt": PROMPT,
    "max_tokens": 8000,
    "ignore_eos": True,
    "return_token_ids": True,
    "return_weight_versions": True,
    "stream": True,
}
SHORT = {**ENDLESS, "max_tokens": 3, "stream": False}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    arguments = ("--control", "--weight-version", "1", "--max-waiting", "0")
    with module_process(
        "examples.tiny_server", "--port", "0", "--cache-dir", str(CACHE), *arguments
    ) as (_, address):
        yield address


@pytest.fixture
def client(url: str) -> Iterator[httpx.Client]:
    """Give a client of a server that neither runs anything nor is paused."""
    with httpx.Client(base_url=url, timeout=60) as client:
        yield client
        client.post("/resume")
        client.post("/abort_requests", json={})
        wait_for_load(client, 0)


def complete(client: httpx.Client, **body: Any) -> dict[str, Any]:
    response = client.post("/v1/completions", json={**SHORT, **body})
    assert response.status_code == 200
    answer: dict[str, Any] = response.json()
    return answer


def wait_for_waiting(client: httpx.Client, waiting: int) -> None:
    deadline = time.monotonic() + 30
    while client.get("/health").json()["waiting"] != waiting:
        assert time.monotonic() < deadline, f"never {waiting} waiting"
        time.sleep(0.02)


def cached_tokens(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def is_paused(client: httpx.Client) -> bool:
    return bool(client.get("/is_paused").json()["is_paused"])


def assert_paused(response: httpx.Response) -> None:
    assert response.status_code == 503
    assert response.headers["retry-after"] == "1"
    assert response.json()["error"]["message"].startswith("Generation is paused")


def test_pausing_by_abort_cuts_what_runs_and_refuses_what_comes(client: httpx.Client) -> None:
    assert not is_paused(client)
    with client.stream("POST", "/v1/completions", json=ENDLESS) as response:
        parts = events(response)
        seen = [next(parts), next(parts)]
        with httpx.Client(base_url=client.base_url, timeout=60) as other:
            assert other.post("/pause").json() == {"status": "paused"}
            assert is_paused(other)
            seen += parts
            assert_paused(other.post("/v1/completions", json=SHORT))
            assert other.post("/resume").json() == {"status": "resumed"}
            assert not is_paused(other)

    last = seen[-1]["choices"][0]
    assert (last["finish_reason"], last["stop_reason"]) == ("abort", None)
    count = sum(len(part["choices"][0]["token_ids"]) for part in seen)
    assert last["weight_versions"] == [{"version": "1", "start": 0, "end": count}]
    assert complete(client)["choices"][0]["finish_reason"] == "length"


def test_pausing_by_wait_lets_what_runs_end(client: httpx.Client) -> None:
    with client.stream("POST", "/v1/completions", json={**ENDLESS, "max_tokens": 12}) as response:
        parts = events(response)
        seen = [next(parts)]
        with httpx.Client(base_url=client.base_url, timeout=60) as other:
            assert other.post("/pause?mode=wait").json() == {"status": "paused"}
            assert other.get("/health").json()["running"] == 0
            assert_paused(other.post("/v1/completions", json=SHORT))
        seen += parts

    assert seen[-1]["choices"][0]["finish_reason"] == "length"
    assert sum(len(part["choices"][0]["token_ids"]) for part in seen) == 12


def test_pausing_by_keep_holds_everything(client: httpx.Client) -> None:
    with (
        ThreadPoolExecutor() as pool,
        httpx.Client(base_url=client.base_url, timeout=60) as other,
        client.stream("POST", "/v1/completions", json={**ENDLESS, "max_tokens": 30}) as response,
    ):
        parts = events(response)
        seen = [next(parts), next(parts)]
        assert other.post("/pause?mode=keep").json() == {"status": "paused"}
        queued = pool.submit(complete, other)
        wait_for_waiting(other, 1)
        # What the queued one samples is stamped with this, so it did not run before.
        other.post("/update_weight_version", json={"new_version": "held"})
        other.post("/resume")
        seen += parts
        (choice,) = queued.result()["choices"]

    assert choice["weight_versions"] == [{"version": "held", "start": 0, "end": 3}]
    before, after = seen[-1]["choices"][0]["weight_versions"]
    assert (before["start"], before["end"], after["end"]) == (0, after["start"], 30)
    assert after["version"] == "held"


def test_a_held_request_can_be_left_and_aborted(client: httpx.Client) -> None:
    assert client.post("/pause?mode=keep").status_code == 200
    with httpx.Client(base_url=client.base_url, timeout=60) as other:
        with other.stream("POST", "/v1/completions", json=ENDLESS) as response:
            assert response.status_code == 200
        wait_for_waiting(client, 0)
        with other.stream("POST", "/v1/completions", json=ENDLESS) as response:
            wait_for_waiting(client, 1)
            assert client.post("/abort_requests", json={}).json()["aborted"] == 1
            (part,) = events(response)
    assert part["choices"][0]["finish_reason"] == "abort"
    assert part["choices"][0]["token_ids"] == []


def test_an_unknown_way_to_pause_is_refused(client: httpx.Client) -> None:
    for query in ("mode=never", "clear_cache=perhaps"):
        assert client.post(f"/pause?{query}").status_code == 400
    assert not is_paused(client)


@pytest.mark.parametrize("name", ["first", "cmpl-first", "cmpl-first-0"])
def test_one_request_is_aborted_by_its_id(client: httpx.Client, name: str) -> None:
    def run(request_id: str) -> str:
        answer = complete(client, request_id=request_id, max_tokens=8000)
        return str(answer["choices"][0]["finish_reason"])

    with ThreadPoolExecutor() as pool:
        first, second = pool.submit(run, "first"), pool.submit(run, "second")
        wait_for_load(client, 2)

        abort = {"request_ids": [name, "nobody"]}
        one = client.post("/abort_requests", json=abort)

        assert one.json() == {"status": "aborted", "aborted": 1}
        assert first.result() == "abort"
        assert not second.done()
        assert client.post("/abort_requests", json={}).json()["aborted"] == 1
        assert second.result() == "abort"


def test_what_names_no_requests_aborts_none(client: httpx.Client) -> None:
    for body in ({"request_ids": "all"}, {"request_ids": [1]}):
        assert client.post("/abort_requests", json=body).status_code == 400
    unknown = client.post("/abort_requests", json={"request_ids": ["nobody"]})
    assert unknown.json()["aborted"] == 0


def test_a_full_queue_says_when_to_come_again(client: httpx.Client) -> None:
    client.post("/pause?mode=keep")
    with httpx.Client(base_url=client.base_url, timeout=60) as many, ExitStack() as held:
        for _ in range(16):
            response = held.enter_context(many.stream("POST", "/v1/completions", json=ENDLESS))
            assert response.status_code == 200

        refused = client.post("/v1/completions", json=SHORT)

        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert refused.json()["error"]["type"] == "Too Many Requests"
    wait_for_waiting(client, 0)


def test_prefixes_are_shared_under_one_salt_alone(client: httpx.Client) -> None:
    client.post("/reset_prefix_cache")
    assert cached_tokens(complete(client, cache_salt="a")) == 0
    assert cached_tokens(complete(client, cache_salt="a")) == len(PROMPT) - 1
    assert cached_tokens(complete(client, cache_salt="b")) == 0
    assert cached_tokens(complete(client)) == 0
    assert cached_tokens(complete(client)) == len(PROMPT) - 1


def test_a_running_request_shares_its_prefix_under_its_salt_alone(client: httpx.Client) -> None:
    client.post("/reset_prefix_cache")
    salted = {**ENDLESS, "cache_salt": "a"}
    with client.stream("POST", "/v1/completions", json=salted) as response:
        next(events(response))
        with httpx.Client(base_url=client.base_url, timeout=60) as other:
            assert cached_tokens(complete(other, cache_salt="b")) == 0
            assert cached_tokens(complete(other, cache_salt="a")) == len(PROMPT) - 1


@pytest.mark.parametrize(
    ("path", "body", "cached"),
    [
        ("/reset_prefix_cache", {}, 0),
        ("/update_weight_version", {"new_version": "1"}, 0),
        ("/pause?mode=abort", {}, 0),
        ("/pause?mode=abort&clear_cache=false", {}, len(PROMPT) - 1),
        ("/pause?mode=keep", {}, len(PROMPT) - 1),
    ],
)
def test_what_forgets_prefixes_and_what_does_not(
    client: httpx.Client, path: str, body: dict[str, Any], cached: int
) -> None:
    complete(client)
    assert client.post(path, json=body).status_code == 200
    client.post("/resume")
    assert cached_tokens(complete(client)) == cached


def test_the_version_is_told_wherever_it_is_asked(client: httpx.Client) -> None:
    relabel = client.post("/update_weight_version", json={"new_version": "41"})
    assert relabel.json() == {"success": True, "new_version": "41"}
    assert client.get("/weight_info").json() == {"weight_version": "41"}
    (card,) = client.get("/v1/models").json()["data"]
    assert card["weight_version"] == "41"
    assert complete(client)["choices"][0]["weight_versions"][0]["version"] == "41"
    for bad in ({}, {"new_version": ""}, {"new_version": 5}):
        assert client.post("/update_weight_version", json=bad).status_code == 400
    assert client.get("/weight_info").json() == {"weight_version": "41"}


def test_weights_are_read_from_nowhere_unless_a_folder_was_opened(client: httpx.Client) -> None:
    body = {"update_info": {"path": "/etc/hostname"}}
    response = client.post("/update_weights", json=body)
    assert response.status_code == 403
    assert "--weights-dir" in response.json()["error"]["message"]
