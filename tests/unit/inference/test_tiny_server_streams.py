"""The model server streams, names requests, and speaks vLLM's other dialects."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

from examples.tiny_server.answers import Completions, Ending, Voice
from examples.tiny_server.fields import Limits
from examples.tiny_server.sampling import Choice
from examples.tiny_server.server import MODEL_NAME
from examples.tiny_server.wire import parse_completion
from rollouts.inference.protocol import Server
from tests.unit.inference.test_tiny_server_http import PROMPT, wait_for_load

TOKENS = {"prompt": PROMPT, "ignore_eos": True, "return_token_ids": True}


@pytest.fixture
def client(tiny_server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=tiny_server.url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))


def events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """Give what a stream sends; it must end with [DONE]."""
    last = ""
    for line in response.iter_lines():
        if line:
            last = line.removeprefix("data: ")
            if last != "[DONE]":
                yield json.loads(last)
    assert last == "[DONE]"


def streamed(client: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    with client.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        return list(events(response))


def test_a_completion_streams_token_by_token(client: httpx.Client, tokenizer: Tokenizer) -> None:
    body = {
        **TOKENS,
        "max_tokens": 6,
        "logprobs": 1,
        "return_weight_versions": True,
        "stream_options": {"include_usage": True},
    }

    *parts, usage = streamed(client, "/v1/completions", body)

    choices = [part["choices"][0] for part in parts]
    assert choices[0]["prompt_token_ids"] == PROMPT
    assert all("prompt_token_ids" not in choice for choice in choices[1:])
    ids = [token for choice in choices for token in choice["token_ids"]]
    assert len(ids) == 6
    assert "".join(choice["text"] for choice in choices) == tokenizer.decode(ids)
    told = [text for choice in choices for text in choice["logprobs"]["tokens"]]
    assert told == [tokenizer.decode([token], skip_special_tokens=False) for token in ids]
    offsets = [offset for choice in choices for offset in choice["logprobs"]["text_offset"]]
    assert offsets == [len("".join(told[:place])) for place in range(6)]
    assert all(value <= 0 for choice in choices for value in choice["logprobs"]["token_logprobs"])
    assert [choice["finish_reason"] for choice in choices][-2:] == [None, "length"]
    assert choices[-1]["weight_versions"] == [{"version": "default", "start": 0, "end": 6}]
    assert len({part["id"] for part in [*parts, usage]}) == 1
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 6
    assert usage["usage"]["prompt_tokens_details"]["cached_tokens"] < len(PROMPT)


def test_a_stream_sends_what_it_has_before_the_end(client: httpx.Client) -> None:
    endless = {**TOKENS, "max_tokens": 8000, "stream": True}
    wait_for_load(client, 0)

    with client.stream("POST", "/v1/completions", json=endless) as response:
        read = events(response)
        first, second = next(read), next(read)
        wait_for_load(client, 1)

    assert first["choices"][0]["finish_reason"] is second["choices"][0]["finish_reason"] is None
    # The client has left: nothing goes on for it.
    wait_for_load(client, 0)


def test_a_streamed_stop_token_is_not_in_the_text(client: httpx.Client) -> None:
    body = {**TOKENS, "max_tokens": 5, "stop_token_ids": list(range(17, 49152)), "temperature": 0}
    (part,) = streamed(client, "/v1/completions", body)
    (choice,) = part["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("", "stop")
    assert choice["token_ids"] == [choice["stop_reason"]]


def test_characters_spread_over_tokens_come_whole(tokenizer: Tokenizer) -> None:
    text = "naïve 日本語 🙂 end"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert len(ids) > len(text.split())
    request = parse_completion({"prompt": [1]}, Limits("m", 49152, 100), lambda _: [])
    voice = Voice(
        "m", 2, lambda some, skip: str(tokenizer.decode(some, skip)), "processed_logprobs"
    )
    dialect = Completions(request, voice)

    parts = [dialect.part([Choice(token, -1.0, token, -1.0)], None) for token in ids[:-1]]
    parts.append(dialect.part([Choice(ids[-1], -1.0, ids[-1], -1.0)], Ending("length")))

    texts = [part["choices"][0]["text"] for part in parts]
    assert "".join(texts) == text
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in texts)


def test_an_old_client_reads_a_stream_until_the_connection_ends(tiny_server: Server) -> None:
    body = json.dumps({**TOKENS, "max_tokens": 2, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.0\r\nContent-Length: {len(body)}\r\n\r\n"
    address = httpx.URL(tiny_server.url)
    with socket.create_connection((address.host, address.port or 80), timeout=60) as connection:
        connection.sendall(head.encode() + body)
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    headers, _, events_sent = answer.partition(b"\r\n\r\n")
    assert b"chunked" not in headers.lower()
    assert events_sent.startswith(b"data: {")
    assert events_sent.endswith(b"data: [DONE]\n\n")


def test_ids_named_by_the_client_come_back(client: httpx.Client) -> None:
    body = {"prompt": PROMPT, "max_tokens": 1, "request_id": "mine"}
    assert client.post("/v1/completions", json=body).json()["id"] == "cmpl-mine"
    header = {"X-Request-Id": "theirs"}
    assert client.post("/v1/completions", json=body, headers=header).json()["id"] == "cmpl-theirs"
    long = client.post("/v1/completions", json=body, headers={"X-Request-Id": "x" * 257})
    assert long.status_code == 400


def test_tokens_may_be_named_by_their_ids(client: httpx.Client) -> None:
    body = {**TOKENS, "max_tokens": 3, "logprobs": 0, "return_tokens_as_token_ids": True}
    (choice,) = client.post("/v1/completions", json=body).json()["choices"]
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]


GENERATE = {
    "token_ids": PROMPT,
    "return_token_ids": True,
    "sampling_params": {"max_tokens": 4, "temperature": 0.8, "logprobs": 1, "ignore_eos": True},
}


def test_generate_gives_ids_with_their_logprobs(client: httpx.Client) -> None:
    body = client.post("/inference/v1/generate", json={**GENERATE, "request_id": "a"}).json()

    assert (body["output_mode"], body["request_id"]) == ("tokens", "generate-tokens-a")
    assert body["prompt_token_ids"] == PROMPT
    (choice,) = body["choices"]
    assert (choice["finish_reason"], len(choice["token_ids"])) == ("length", 4)
    content = choice["logprobs"]["content"]
    assert [entry["token_id"] for entry in content] == choice["token_ids"]
    assert [entry["token"] for entry in content] == [
        f"token_id:{token}" for token in choice["token_ids"]
    ]
    for entry in content:
        assert entry["top_logprobs"][0]["token_id"] == entry["token_id"]
        assert max(top["logprob"] for top in entry["top_logprobs"]) >= entry["logprob"]
    assert choice["weight_versions"] == [{"version": "default", "start": 0, "end": 4}]
    assert body["usage"]["total_tokens"] == len(PROMPT) + 4


def test_generate_streams(client: httpx.Client) -> None:
    parts = streamed(client, "/inference/v1/generate", GENERATE)
    assert parts[0]["prompt_token_ids"] == PROMPT
    choices = [part["choices"][0] for part in parts]
    ids = [token for choice in choices for token in choice["token_ids"]]
    entries = [entry for choice in choices for entry in choice["logprobs"]["content"]]
    assert [entry["token_id"] for entry in entries] == ids
    assert len(ids) == 4
    assert choices[-1]["weight_versions"] == [{"version": "default", "start": 0, "end": 4}]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"token_ids": "hello"}, "token_ids"),
        ({"token_ids": []}, "token_ids"),
        ({"output_mode": "text"}, "output_mode"),
        ({"sampling_params": {"n": 2}}, "n"),
        ({"sampling_params": {"stop": ["x"]}}, "stop"),
        ({"sampling_params": {"max_tokens": 9000}}, "max_tokens"),
    ],
)
def test_generate_refuses_what_it_does_not_do(
    client: httpx.Client, body: dict[str, Any], param: str
) -> None:
    response = client.post("/inference/v1/generate", json={**GENERATE, **body})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_control_is_closed_unless_it_was_opened(client: httpx.Client) -> None:
    for path in ("/pause", "/resume", "/abort_requests", "/update_weights", "/reset_prefix_cache"):
        response = client.post(path, json={})
        assert response.status_code == 404
        assert response.json()["error"]["type"] == "NotFoundError"


def test_models_tell_the_weight_version(client: httpx.Client) -> None:
    (card,) = client.get("/v1/models").json()["data"]
    assert (card["id"], card["weight_version"]) == (MODEL_NAME, "default")
