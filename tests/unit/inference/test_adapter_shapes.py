"""The adapters speak as vLLM 0.33.0 and SGLang 0.5.23 do: their own classes check both sides.

Shape-only, because the packages define no class for them: control routes, `/health`, models.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, NoReturn

import httpx
import pytest

from rollouts.inference.adapters import as_token_adapter, default_adapters
from rollouts.inference.control import SglangControl, VllmControl
from rollouts.inference.exceptions import ControlRefused, RequestRejected, WrongModel
from rollouts.inference.protocol import ControlAdapter, SamplingParams, Server, TokenAdapter
from rollouts.inference.transport import Transport
from tests.shape_servers.made_up import MODEL, STOP, logprob, sampled
from tests.shape_servers.packages import SGLANG, VLLM, Package, SourcesMissingError, sources
from tests.unit.inference.conftest import ROOT

PROMPT = [11, 22, 33]
SAMPLING = SamplingParams(
    temperature=0.25, top_p=0.9, top_k=40, seed=3, max_tokens=9, stop_token_ids=(STOP,)
)


def unavailable(reason: str) -> NoReturn:
    """Skip on a laptop, fail in CI: a suite that silently skips proves nothing."""
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


@contextmanager
def shape_server(package: Package) -> Iterator[str]:
    if find_spec("msgspec") is None:
        unavailable("msgspec is not installed")
    try:
        folder = sources(package, ROOT / "var" / "cache" / "shapes")
    except SourcesMissingError as error:
        unavailable(str(error))
    command = [sys.executable, "-m", "tests.shape_servers", package.name, str(folder)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert " at http://" in line, f"the server did not start: {line!r}"
            yield line.rsplit(" at ", 1)[1].strip()
        finally:
            process.kill()


@pytest.fixture(scope="module")
def vllm_url() -> Iterator[str]:
    with shape_server(VLLM) as url:
        yield url


@pytest.fixture(scope="module")
def sglang_url() -> Iterator[str]:
    with shape_server(SGLANG) as url:
        yield url


@pytest.fixture
def transport() -> Iterator[Transport]:
    transport = Transport()
    yield transport
    transport.close()


def adapter_of(kind: str, transport: Transport) -> TokenAdapter:
    return as_token_adapter(default_adapters(transport=transport)[kind], kind)


def expected(temperature: float, *, raw: bool = False) -> tuple[tuple[int, ...], tuple[float, ...]]:
    ids, _ = sampled(PROMPT, SAMPLING.max_tokens, (STOP,))
    return tuple(ids), tuple(logprob(token, temperature, raw=raw) for token in ids)


@pytest.mark.parametrize("kind", ["vllm", "vllm_generate"])
def test_vllm_streams_ids_logprobs_and_versions(
    vllm_url: str, transport: Transport, kind: str
) -> None:
    server = Server("s", vllm_url, kind, MODEL)
    adapter = adapter_of(kind, transport)

    turn = adapter.generate(server, PROMPT, SAMPLING, timeout_seconds=20, cache_salt="v3")

    assert (turn.token_ids, turn.logprobs) == expected(0.25)
    assert (turn.finish_reason, turn.server_id) == ("stop", "s")
    assert (turn.policy_version, turn.version_runs) == (3, ((2, 1), (3, 4)))


def test_vllm_tells_how_much_was_cached(vllm_url: str, transport: Transport) -> None:
    server = Server("s", vllm_url, "vllm", MODEL)
    turn = adapter_of("vllm", transport).generate(server, PROMPT, SAMPLING, timeout_seconds=20)
    assert turn.cached_tokens == 1


@pytest.mark.parametrize("kind", ["vllm", "vllm_generate"])
def test_vllm_cut_at_its_length(vllm_url: str, transport: Transport, kind: str) -> None:
    server = Server("s", vllm_url, kind, MODEL)
    short = SamplingParams(max_tokens=1)
    turn = adapter_of(kind, transport).generate(server, PROMPT, short, timeout_seconds=20)
    assert (turn.token_ids, turn.finish_reason) == ((66,), "length")
    assert (turn.policy_version, turn.version_runs) == (2, ())


def test_vllm_refuses_what_its_classes_refuse(vllm_url: str, transport: Transport) -> None:
    adapter = adapter_of("vllm", transport)
    with pytest.raises(RequestRejected, match="greater than or equal to 0"):
        adapter.generate(Server("s", vllm_url, "vllm", MODEL), [-1], SAMPLING, timeout_seconds=20)
    with pytest.raises(WrongModel, match="does not exist"):
        adapter.generate(
            Server("s", vllm_url, "vllm", "other"), PROMPT, SAMPLING, timeout_seconds=20
        )


@pytest.mark.parametrize("incremental", [False, True], ids=["cumulative", "incremental"])
def test_sglang_streams_ids_logprobs_and_versions(
    sglang_url: str, transport: Transport, incremental: bool
) -> None:
    httpx.post(f"{sglang_url}/_mode", json={"incremental": incremental, "raw": False})
    server = Server("s", sglang_url, "sglang", MODEL)

    turn = adapter_of("sglang", transport).generate(
        server, PROMPT, SAMPLING, timeout_seconds=20, cache_salt="v5"
    )

    assert (turn.token_ids, turn.logprobs) == expected(0.25)
    assert (turn.finish_reason, turn.cached_tokens) == ("stop", 1)
    assert (turn.policy_version, turn.version_runs) == (5, ((4, 1), (5, 4)))


def test_sglang_refuses_what_its_contract_refuses(sglang_url: str, transport: Transport) -> None:
    broken: Any = ["eleven"]
    with pytest.raises(RequestRejected, match="invalid type"):
        adapter_of("sglang", transport).generate(
            Server("s", sglang_url, "sglang", MODEL), broken, SAMPLING, timeout_seconds=20
        )


def test_raw_logprobs_are_noticed_and_said(sglang_url: str, transport: Transport) -> None:
    server = Server("s", sglang_url, "sglang", MODEL)
    httpx.post(f"{sglang_url}/_mode", json={"incremental": False, "raw": True})
    raw = adapter_of("sglang", transport).health(server, timeout_seconds=20)
    httpx.post(f"{sglang_url}/_mode", json={"incremental": False, "raw": False})
    processed = adapter_of("sglang", transport).health(server, timeout_seconds=20)

    assert (raw.ok, raw.logprob_mode, raw.policy_version) == (True, "raw_logprobs", 5)
    assert "raw, from before the temperature" in raw.detail
    assert (processed.ok, processed.logprob_mode) == (True, "processed_logprobs")
    assert processed.detail == f"serves {MODEL}"


def test_vllm_health_is_tried_out(vllm_url: str, transport: Transport) -> None:
    server = Server("s", vllm_url, "vllm", MODEL)
    health = adapter_of("vllm", transport).health(server, timeout_seconds=20)
    assert (health.ok, health.logprob_mode) == (True, "processed_logprobs")
    assert health.max_model_len == 4096


def steer(control: ControlAdapter, server: Server, version: int) -> list[int | None]:
    told = [control.weight_version(server, timeout_seconds=20)]
    control.pause(server, abort=True, timeout_seconds=20)
    control.set_weight_version(server, version, timeout_seconds=20)
    control.flush_cache(server, timeout_seconds=20)
    control.resume(server, timeout_seconds=20)
    control.pause(server, abort=False, timeout_seconds=20)
    control.resume(server, timeout_seconds=20)
    told.append(control.weight_version(server, timeout_seconds=20))
    control.set_weight_version(server, told[0] or 0, timeout_seconds=20)
    return told


def test_shape_only_vllm_is_steered(vllm_url: str, transport: Transport) -> None:
    server = Server("s", vllm_url, "vllm", MODEL)
    assert steer(VllmControl(transport), server, 9) == [3, 9]


def test_shape_only_sglang_is_steered(sglang_url: str, transport: Transport) -> None:
    server = Server("s", sglang_url, "sglang", MODEL)
    assert steer(SglangControl(transport), server, 9) == [5, 9]


def test_a_closed_route_says_how_to_open_it(sglang_url: str, transport: Transport) -> None:
    server = Server("s", sglang_url, "vllm", MODEL)
    with pytest.raises(ControlRefused, match="VLLM_SERVER_DEV_MODE=1") as caught:
        VllmControl(transport).resume(server, timeout_seconds=20)
    assert (caught.value.code, caught.value.server_id) == ("inference.control_refused", "s")
