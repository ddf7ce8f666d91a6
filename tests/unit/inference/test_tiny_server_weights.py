"""Weights exchanged while the model server runs: exact, versioned, and never mixed in a cache."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import save_file

from examples.tiny_server.model import Chunk, KeyValueCache, Model
from examples.tiny_server.sampling import log_softmax
from examples.tiny_server.tensors import named_tensors, replaced
from examples.tiny_server.weights import Array, Weights, load_weights
from tests.unit.inference.conftest import CACHE, ROOT, module_process
from tests.unit.inference.test_tiny_server_control import cached_tokens
from tests.unit.inference.test_tiny_server_http import PROMPT, wait_for_load
from tests.unit.inference.test_tiny_server_streams import events

GREEDY = {
    "prompt": PROMPT,
    "max_tokens": 6,
    "temperature": 0,
    "ignore_eos": True,
    "logprobs": 0,
    "return_token_ids": True,
    "return_weight_versions": True,
}


@pytest.fixture(scope="module")
def first() -> Weights:
    return load_weights(CACHE)


@pytest.fixture(scope="module")
def tensors(first: Weights) -> dict[str, Array]:
    """Return a small change that moves every log-probability: one in a layer, one at the end."""
    named = named_tensors(first)
    changes = {"blk.3.attn_q.weight": 1.5, "output_norm.weight": 0.8}
    return {name: named[name] * np.float32(factor) for name, factor in changes.items()}


@pytest.fixture(scope="module")
def folder(tensors: dict[str, Array], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    np.savez(folder / "second.npz", **tensors)  # type: ignore[arg-type]
    save_file(tensors, folder / "second.safetensors")
    for number, (name, tensor) in enumerate(tensors.items()):
        np.savez(folder / f"part-{number}.npz", **{name: tensor})  # type: ignore[arg-type]
    return folder


@pytest.fixture(scope="module")
def fresh(folder: Path) -> Iterator[httpx.Client]:
    """Start a server whose weights were the new ones from its start; it gives raw ones."""
    second = ("--weights", str(folder / "second.npz"), "--logprobs-mode", "raw_logprobs")
    yield from served(*second)


@pytest.fixture(scope="module")
def restored(first: Weights, folder: Path) -> Iterator[httpx.Client]:
    original = {
        name: tensor
        for name, tensor in named_tensors(first).items()
        if name in ("blk.3.attn_q.weight", "output_norm.weight")
    }
    np.savez(folder / "first.npz", **original)  # type: ignore[arg-type]
    yield from served("--control", "--weights-dir", str(folder))


@pytest.fixture
def client(restored: httpx.Client) -> httpx.Client:
    """Give a client of a server with its first weights, called version 1, and no prefixes."""
    assert update(restored, "first.npz", "1").status_code == 200
    return restored


def served(*arguments: str) -> Iterator[httpx.Client]:
    with (
        module_process(
            "examples.tiny_server", "--port", "0", "--cache-dir", str(CACHE), *arguments
        ) as (_, url),
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        yield client


def update(client: httpx.Client, path: str, version: str | None = None) -> httpx.Response:
    info = {"path": path} if version is None else {"path": path, "weight_version": version}
    return client.post("/update_weights", json={"update_info": info})


def greedy(client: httpx.Client, **body: Any) -> dict[str, Any]:
    response = client.post("/v1/completions", json={**GREEDY, **body})
    assert response.status_code == 200
    answer: dict[str, Any] = response.json()
    return answer


def logprobs(answer: dict[str, Any]) -> Array:
    return np.array(answer["choices"][0]["logprobs"]["token_logprobs"], dtype=np.float32)


@pytest.mark.parametrize("suffix", ["npz", "safetensors"])
def test_a_warm_prefix_cache_never_serves_other_weights(
    client: httpx.Client, fresh: httpx.Client, suffix: str
) -> None:
    old = greedy(client)
    warm = greedy(client)
    assert cached_tokens(warm) == len(PROMPT) - 1
    fresh_salt = {"cache_salt": suffix}

    assert update(client, f"second.{suffix}", "2").json() == {"message": "Weights updated"}

    new, expected = greedy(client), greedy(fresh, **fresh_salt)
    assert cached_tokens(new) == cached_tokens(expected) == 0
    assert new["choices"][0]["token_ids"] == expected["choices"][0]["token_ids"]
    assert np.abs(logprobs(new) - logprobs(expected)).max() < 1e-5
    assert np.abs(logprobs(new)[0] - logprobs(old)[0]) > 1e-2
    # And the prefix that the new weights computed does serve again.
    again = greedy(client)
    assert cached_tokens(again) == len(PROMPT) - 1
    assert np.abs(logprobs(again) - logprobs(expected)).max() < 1e-3


def test_a_running_request_goes_on_with_the_new_weights_and_its_old_keys(
    client: httpx.Client, first: Weights, tensors: dict[str, Array]
) -> None:
    body = {**GREEDY, "max_tokens": 24, "stream": True}
    with client.stream("POST", "/v1/completions", json=body) as response:
        parts = events(response)
        seen = [next(parts), next(parts)]
        with httpx.Client(base_url=client.base_url, timeout=60) as other:
            assert update(other, "second.npz", "2").status_code == 200
        seen += parts

    choices = [part["choices"][0] for part in seen]
    ids = [token for choice in choices for token in choice["token_ids"]]
    told = [value for choice in choices for value in choice["logprobs"]["token_logprobs"]]
    before, after = choices[-1]["weight_versions"]
    turn = before["end"]
    assert (before["version"], before["start"]) == ("1", 0)
    assert after == {"version": "2", "start": turn, "end": 24}
    assert turn >= 2

    # The same by hand: the first model up to the exchange, the second over the same cache.
    cache = KeyValueCache(first.config, len(PROMPT) + 24)
    expected: list[float] = []
    models = {"1": Model(first), "2": Model(replaced(first, tensors))}
    feed = np.asarray(PROMPT)
    for place, token in enumerate(ids):
        logits = models["1" if place < turn else "2"].forward([Chunk(cache, feed)])
        expected.append(float(log_softmax(logits)[0, token]))
        feed = np.asarray([token])
    assert np.abs(np.array(told) - np.array(expected)).max() < 1e-3

    # Its keys are of two sets of weights: nobody else gets them.
    assert cached_tokens(greedy(client, prompt=[*PROMPT, *ids])) == 0


def test_an_update_of_several_files_is_one_exchange(
    client: httpx.Client, fresh: httpx.Client, folder: Path
) -> None:
    old = greedy(client)
    assert client.post("/start_weight_update").status_code == 200
    assert client.post("/start_weight_update").status_code == 400
    for path in ("part-0.npz", str(folder / "part-1.npz")):
        assert update(client, path).status_code == 200
    assert update(client, "part-0.npz", "2").status_code == 400
    assert client.get("/weight_info").json() == {"weight_version": "1"}
    assert np.abs(logprobs(greedy(client)) - logprobs(old)).max() < 1e-3

    finish = client.post("/finish_weight_update", json={"weight_version": "2"})

    assert finish.json() == {"message": "Weight update finished"}
    new = greedy(client)
    expected = logprobs(greedy(fresh, cache_salt="several"))
    assert np.abs(logprobs(new) - expected).max() < 1e-5
    assert new["choices"][0]["weight_versions"] == [{"version": "2", "start": 0, "end": 6}]
    assert client.post("/finish_weight_update", json={}).status_code == 400


def test_an_update_without_files_changes_the_version_alone(client: httpx.Client) -> None:
    client.post("/start_weight_update")
    assert client.post("/finish_weight_update", json={"weight_version": "9"}).status_code == 200
    assert client.get("/weight_info").json() == {"weight_version": "9"}


Bad = Callable[[Path, dict[str, Array]], str]


def unknown(folder: Path, tensors: dict[str, Array]) -> str:
    np.savez(folder / "bad.npz", **{**tensors, "blk.99.attn_q.weight": np.zeros(1)})  # type: ignore[arg-type]
    return "bad.npz"


def misshapen(folder: Path, tensors: dict[str, Array]) -> str:
    np.savez(folder / "bad.npz", **{**tensors, "output_norm.weight": np.zeros(5)})  # type: ignore[arg-type]
    return "bad.npz"


def infinite(folder: Path, tensors: dict[str, Array]) -> str:
    bad = tensors["output_norm.weight"].copy()
    bad[3] = np.nan
    np.savez(folder / "bad.npz", **{"output_norm.weight": bad})  # type: ignore[arg-type]
    return "bad.npz"


def integers(folder: Path, tensors: dict[str, Array]) -> str:
    whole = np.ones(tensors["output_norm.weight"].shape, dtype=np.int64)
    np.savez(folder / "bad.npz", **{"output_norm.weight": whole})  # type: ignore[arg-type]
    return "bad.npz"


def pickled(folder: Path, _tensors: dict[str, Array]) -> str:
    np.savez(folder / "bad.npz", **{"output_norm.weight": np.array([{}], dtype=object)})  # type: ignore[arg-type]
    return "bad.npz"


def cut(folder: Path, _tensors: dict[str, Array]) -> str:
    (folder / "bad.npz").write_bytes((folder / "second.npz").read_bytes()[:1000])
    return "bad.npz"


def no_such_format(folder: Path, _tensors: dict[str, Array]) -> str:
    (folder / "bad.bin").write_bytes(b"weights")
    return "bad.bin"


def cut_safetensors(folder: Path, _tensors: dict[str, Array]) -> str:
    (folder / "bad.safetensors").write_bytes(b"\xff" * 100)
    return "bad.safetensors"


def outside(folder: Path, _tensors: dict[str, Array]) -> str:
    target = folder.parent / f"{folder.name}-outside.npz"
    target.write_bytes((folder / "second.npz").read_bytes())
    return f"../{target.name}"


def absolute(folder: Path, tensors: dict[str, Array]) -> str:
    return str((folder / outside(folder, tensors)).resolve())


def linked(folder: Path, tensors: dict[str, Array]) -> str:
    link = folder / "link.npz"
    link.unlink(missing_ok=True)
    link.symlink_to(absolute(folder, tensors))
    return link.name


def missing(_folder: Path, _tensors: dict[str, Array]) -> str:
    return "nothing.npz"


def a_folder(_folder: Path, _tensors: dict[str, Array]) -> str:
    return "."


@pytest.mark.parametrize(
    "make",
    [
        unknown,
        misshapen,
        infinite,
        integers,
        pickled,
        cut,
        no_such_format,
        cut_safetensors,
        outside,
        absolute,
        linked,
        missing,
        a_folder,
    ],
)
def test_a_file_that_is_refused_changes_nothing(
    client: httpx.Client, folder: Path, tensors: dict[str, Array], make: Bad
) -> None:
    old = greedy(client)

    response = update(client, make(folder, tensors), "2")

    assert response.status_code == 400
    assert response.json()["error"]["param"] == "update_info"
    assert client.get("/weight_info").json() == {"weight_version": "1"}
    same = greedy(client)
    # The prefix is still warm, and still of the same weights.
    assert cached_tokens(same) == len(PROMPT) - 1
    assert np.abs(logprobs(same) - logprobs(old)).max() < 1e-3


@pytest.mark.parametrize("info", [None, 5, {}, {"path": 5}, {"path": ""}, {"path": "a\0b"}])
def test_an_update_that_names_no_file_is_refused(client: httpx.Client, info: Any) -> None:
    response = client.post("/update_weights", json={"update_info": info})
    assert response.status_code == 400


def test_weights_that_give_nonsense_fail_the_request_and_not_the_server(
    client: httpx.Client, folder: Path, first: Weights
) -> None:
    huge = np.full(first.config.hidden, np.finfo(np.float32).max, dtype=np.float32)
    np.savez(folder / "huge.npz", **{"output_norm.weight": huge})  # type: ignore[arg-type]
    assert update(client, "huge.npz", "2").status_code == 200

    response = client.post("/v1/completions", json=GREEDY)

    assert response.status_code == 500
    assert "no finite log-probabilities" in response.json()["error"]["message"]
    assert update(client, "first.npz", "3").status_code == 200
    assert np.isfinite(logprobs(greedy(client))).all()
    wait_for_load(client, 0)


def test_raw_logprobs_are_those_before_temperature(
    fresh: httpx.Client, first: Weights, tensors: dict[str, Array]
) -> None:
    answer = greedy(fresh, temperature=0.5, seed=3)
    assert answer["logprobs_mode"] == "raw_logprobs"
    ids = answer["choices"][0]["token_ids"]
    logits = Model(replaced(first, tensors)).logits_everywhere([*PROMPT, *ids])
    expected = log_softmax(logits[len(PROMPT) - 1 : -1])[np.arange(6), ids]
    assert np.abs(logprobs(answer) - expected).max() < 1e-3


def test_every_tensor_of_the_file_has_its_place(first: Weights) -> None:
    import gguf

    from examples.tiny_server.weights import gguf_path

    named = named_tensors(first)
    file = {tensor.name: tensor for tensor in gguf.GGUFReader(gguf_path()).tensors}
    assert set(named) == set(file)
    for name in ("blk.7.attn_k.weight", "blk.7.attn_v.weight", "blk.7.ffn_gate.weight"):
        expected = gguf.dequantize(file[name].data, file[name].tensor_type)
        assert np.array_equal(named[name], expected)


def test_the_command_line_exports_weights(first: Weights, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "examples.tiny_server", "export-weights"]
    target = tmp_path / "out.npz"
    only = ["--only", "blk.2.attn_v.weight", "--only", "output_norm.weight"]
    subprocess.run(
        [*command, str(target), *only, "--cache-dir", str(CACHE)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    with np.load(target) as written:
        assert set(written.files) == {"blk.2.attn_v.weight", "output_norm.weight"}
        for name in written.files:
            assert np.array_equal(written[name], named_tensors(first)[name])

    wrong = subprocess.run(
        [*command, str(tmp_path / "no.npz"), "--only", "nothing", "--cache-dir", str(CACHE)],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
    )
    assert wrong.returncode == 2
    assert "no tensor is called nothing" in wrong.stderr
    assert not (tmp_path / "no.npz").exists()
