"""The model server over HTTP: vLLM's shape, clear refusals, disconnects, its tokenizer folder."""

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from examples.tiny_server.server import MODEL_NAME
from rollouts.inference.protocol import Server
from tests.unit.inference.conftest import ROOT

PROMPT = [1, 4093, 198, 36218, 15876, 2, 198, 1, 520, 9531, 198]


@pytest.fixture
def client(tiny_server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=tiny_server.url, timeout=60) as client:
        yield client


def complete(client: httpx.Client, **body: Any) -> httpx.Response:
    return client.post("/v1/completions", json={"model": MODEL_NAME, "prompt": PROMPT, **body})


def test_an_answer_has_vllms_shape(client: httpx.Client, tokenizer_folder: Path) -> None:
    tokenizer = loaded(tokenizer_folder)
    response = complete(client, max_tokens=5, logprobs=1, return_token_ids=True, ignore_eos=True)

    assert response.status_code == 200
    body = response.json()
    (choice,) = body["choices"]
    assert choice["prompt_token_ids"] == PROMPT
    assert len(choice["token_ids"]) == 5
    assert choice["finish_reason"] == "length"
    assert choice["stop_reason"] is None
    logprobs = choice["logprobs"]
    # A character may be spread over several tokens, so the tokens' own texts need not add up.
    assert logprobs["tokens"] == [
        tokenizer.decode([token], skip_special_tokens=False) for token in choice["token_ids"]
    ]
    assert tokenizer.decode(choice["token_ids"]) == choice["text"]
    assert len(logprobs["token_logprobs"]) == len(logprobs["top_logprobs"]) == 5
    details = body["usage"].pop("prompt_tokens_details")
    assert body["usage"] == {"prompt_tokens": 11, "completion_tokens": 5, "total_tokens": 16}
    assert 0 <= details["cached_tokens"] < 11
    assert (body["model"], body["logprobs_mode"]) == (MODEL_NAME, "processed_logprobs")


def test_each_tokens_entry_holds_its_own_and_the_likeliest_log_probability(
    client: httpx.Client,
) -> None:
    # By id: two tokens that each hold a part of a character have the same text, hence one entry.
    options = {"return_token_ids": True, "return_tokens_as_token_ids": True, "ignore_eos": True}
    (choice,) = complete(client, max_tokens=5, logprobs=1, **options).json()["choices"]

    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]
    for token, logprob, top in zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        assert top[token] == logprob
        assert max(top.values()) >= logprob
        assert len(top) == (1 if max(top.values()) == logprob else 2)


def test_a_stop_token_is_among_the_ids_and_not_in_the_text(client: httpx.Client) -> None:
    every = list(range(17, 49152))
    choice = complete(
        client, max_tokens=5, return_token_ids=True, stop_token_ids=every, temperature=0
    ).json()["choices"][0]

    assert len(choice["token_ids"]) == 1
    assert (choice["finish_reason"], choice["text"]) == ("stop", "")
    assert choice["stop_reason"] == choice["token_ids"][0]
    assert choice["logprobs"] is None


def test_a_text_prompt_works_too(client: httpx.Client) -> None:
    text = "<|im_start|>user\nSay hi<|im_end|>\n<|im_start|>assistant\n"
    choice = complete(client, prompt=text, max_tokens=1, return_token_ids=True).json()["choices"][0]
    assert choice["prompt_token_ids"] == PROMPT


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        ({"prompt": []}, 400, "empty"),
        ({"prompt": None}, 400, "token ids"),
        ({"prompt": [1, 49152]}, 400, "49152"),
        ({"prompt": [-1]}, 400, "-1"),
        ({"prompt": [1, True]}, 400, "token ids"),
        ({"prompt": [1.0]}, 400, "token ids"),
        ({"prompt": [[1], [2]]}, 400, "token ids"),
        ({"prompt": [5] * 8192}, 400, "maximum context length is 8192"),
        ({"max_tokens": 8192}, 400, "maximum context length is 8192"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"max_tokens": "5"}, 400, "max_tokens"),
        ({"temperature": -1}, 400, "temperature"),
        ({"temperature": True}, 400, "temperature"),
        ({"temperature": 10**400}, 400, "temperature"),
        ({"top_p": 0}, 400, "top_p"),
        ({"top_k": 1.5}, 400, "top_k"),
        ({"seed": -1}, 400, "seed"),
        ({"logprobs": 20}, 400, "logprobs"),
        ({"n": 2}, 400, "n must be"),
        ({"stream": 1}, 400, "stream"),
        ({"stream_options": 3, "stream": True}, 400, "stream_options"),
        ({"stream_options": {"continuous_usage_stats": True}}, 400, "continuous_usage_stats"),
        ({"stop": ["a"]}, 400, "stop"),
        ({"repetition_penalty": 1.2}, 400, "repetition_penalty"),
        ({"cache_salt": 5}, 400, "cache_salt"),
        ({"request_id": "x" * 257}, 400, "request_id"),
        ({"stop_token_ids": ["a"]}, 400, "stop_token_ids"),
        ({"return_token_ids": 1}, 400, "return_token_ids"),
        ({"model": "gpt-5"}, 404, "does not exist"),
    ],
)
def test_bad_input_is_refused_with_a_reason(
    client: httpx.Client, body: dict[str, Any], status: int, says: str
) -> None:
    response = complete(client, **body)
    assert response.status_code == status
    error = response.json()["error"]
    assert says in error["message"]
    kind = "BadRequestError" if status == 400 else "NotFoundError"
    assert (error["type"], error["param"], error["code"]) == (kind, next(iter(body)), status)


@pytest.mark.parametrize("body", [b"{bad", b"", b"[1]", b"\xff", b"[" * 100_000])
def test_a_body_that_is_no_object_is_refused(client: httpx.Client, body: bytes) -> None:
    response = client.post("/v1/completions", content=body)
    assert response.status_code == 400
    assert "JSON" in response.json()["error"]["message"]


def test_a_body_that_is_too_large_is_refused_before_it_is_read(tiny_server: Server) -> None:
    address = httpx.URL(tiny_server.url)
    with socket.create_connection((address.host, address.port or 80), timeout=60) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n")
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 413 ")


def test_unknown_paths_and_methods(client: httpx.Client) -> None:
    assert client.get("/nowhere").status_code == 404
    assert client.get("/v1/completions").status_code == 405


def test_health_and_models(client: httpx.Client) -> None:
    health = client.get("/health")
    assert (health.status_code, health.json()["model"]) == (200, MODEL_NAME)
    (card,) = client.get("/v1/models").json()["data"]
    assert (card["id"], card["max_model_len"]) == (MODEL_NAME, 8192)


def wait_for_load(client: httpx.Client, running: int) -> None:
    deadline = time.monotonic() + 30
    while client.get("/health").json()["running"] != running:
        assert time.monotonic() < deadline, f"never {running} running"
        time.sleep(0.02)


def test_a_client_that_leaves_ends_its_sequence(tiny_server: Server, client: httpx.Client) -> None:
    wait_for_load(client, 0)
    body = json.dumps({"prompt": PROMPT, "max_tokens": 8000, "ignore_eos": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    address = httpx.URL(tiny_server.url)
    with socket.create_connection((address.host, address.port or 80)) as connection:
        connection.sendall(head.encode() + body)
        wait_for_load(client, 1)

    wait_for_load(client, 0)


def test_the_exported_folder_has_the_right_specials(tokenizer_folder: Path) -> None:
    config = json.loads((tokenizer_folder / "tokenizer_config.json").read_text())
    tokenizer = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    named = {name: config[f"{name}_token"] for name in ("bos", "eos", "pad", "unk")}
    assert named == {
        "bos": "<|im_start|>",
        "eos": "<|im_end|>",
        "pad": "<|im_end|>",
        "unk": "<|endoftext|>",
    }
    assert [tokenizer.token_to_id(text) for text in named.values()] == [1, 2, 2, 0]
    assert tokenizer.get_vocab_size(with_added_tokens=True) == 49152
    assert tokenizer.encode("<|im_start|>a<|im_end|>").ids == [1, 81, 2]
    assert tokenizer.encode("2024").ids == [34, 32, 34, 36]
    assert "<|im_start|>" in config["chat_template"]


@given(text=st.text(alphabet=st.characters(max_codepoint=0xFFFF, exclude_categories=["C"])))
@settings(deadline=None)
def test_text_survives_a_round_trip(tokenizer_folder: Path, text: str) -> None:
    tokenizer = loaded(tokenizer_folder)
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


_LOADED: dict[Path, Tokenizer] = {}


def loaded(folder: Path) -> Tokenizer:
    if folder not in _LOADED:
        _LOADED[folder] = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return _LOADED[folder]


def test_the_folder_equals_what_transformers_makes_of_the_same_file(
    tokenizer_folder: Path,
) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizer_folder)
    ours = loaded(tokenizer_folder)
    for text in (
        "def f(x):\n    return x + 10\n",
        "naïve 日本 1234567 it's",
        "<|im_end|>  \n\n\t a",
    ):
        assert ours.encode(text).ids == tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.eos_token_id == 2


def test_ending_the_first_start_leaves_no_half_written_cache(tmp_path: Path) -> None:
    arguments = ("--port", "0", "--cache-dir", str(tmp_path))
    with subprocess.Popen(
        [sys.executable, "-m", "examples.tiny_server", *arguments], cwd=ROOT
    ) as process:
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob("unfinished-*/weights.f32")):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.terminate()
        assert process.wait(timeout=60) == 128 + 15

    assert list(tmp_path.iterdir()) == []


def test_the_command_line_exports_the_folder(tokenizer_folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "tokenizer"
    subprocess.run(
        [sys.executable, "-m", "examples.tiny_server", "export-tokenizer", str(target)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (target / name).read_bytes() == (tokenizer_folder / name).read_bytes()
