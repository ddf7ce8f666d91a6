"""One whole stack for the end-to-end tests; each test finds it complete and behaving."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from examples.demo.trainer import Trainer
from examples.tiny_server.tokenizer import export_tokenizer
from prorl_site.stack.processes import ROOT
from prorl_site.stack.stack import Stack
from tests.e2e.harness import TIMINGS, Line, ModelServer

BASE_IMAGE = Path(os.environ.get("PRORL_BASE_IMAGE") or ROOT / "var" / "images" / "base")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all of them: they need workers and sandboxes."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.broker)
            item.add_marker(pytest.mark.sandbox)
            item.add_marker(pytest.mark.timeout(600))


def _need(condition: bool, reason: str) -> None:
    """Skip on a laptop, fail in CI."""
    if not condition:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the real tokenizer of the demo's model."""
    folder = tmp_path_factory.mktemp("tokenizer") / "smollm2"
    export_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def whole_line(tokenizer_folder: Path) -> Iterator[Line]:
    """Start the stack with short leases; end every process of it after the last test."""
    _need(
        bool(shutil.which("apptainer") or shutil.which("singularity")),
        "needs Apptainer: run scripts/install-apptainer",
    )
    _need(BASE_IMAGE.is_dir(), "needs the base image: run scripts/build-base-image")
    var = Path(tempfile.mkdtemp(prefix="prorl-e2e-"))
    var.chmod(0o755)
    settings = {**TIMINGS, "PRORL_IMAGE_ROOT": str(BASE_IMAGE.parent)}
    stack = Stack(var, settings=settings, database="e2e")
    server = ModelServer(tokenizer_folder)
    inherited = {
        name: os.environ.pop(name, None) for name in ("PRORL_VAR", "PRORL_PORT", "PRORL_BASE_IMAGE")
    }
    try:
        stack.prepare()
        server.start()
        stack.start()
        stack.manage("seed_catalogue")
        token = stack.manage("create_trainer", "e2e", "--quiet").strip()
        stack.manage("create_operator", "operator", "--password", "e2e-password-1")
        operator = stack.manage(
            "create_trainer",
            "operator",
            "--quiet",
            "--scopes",
            "read",
            "submit",
            "policy",
            "operate",
        ).strip()
        stack.wait_ready()
        trainer = Trainer(stack.url, token)
        policy = trainer.call(
            "POST",
            "/policies/",
            {
                "name": "scripted",
                "model": "scripted-not-a-model",
                "tokenizer": str(tokenizer_folder),
                "context_tokens": 32768,
            },
        )
        body = {"policy": policy["id"], "url": server.url, "kind": "vllm", "max_in_flight": 64}
        trainer.call("POST", "/inference-servers/", body)
        operator_client = Trainer(stack.url, operator)
        yield Line(stack, server, trainer, operator_client, policy["id"])
        operator_client.close()
        trainer.close()
    finally:
        server.kill()
        stack.stop()
        for name, value in inherited.items():
            if value is not None:
                os.environ[name] = value
        if not os.environ.get("E2E_KEEP"):
            shutil.rmtree(var, ignore_errors=True)


@pytest.fixture
def line(whole_line: Line) -> Line:
    """Return the stack with every process up and the scripted server behaving."""
    whole_line.ensure_up()
    return whole_line


@pytest.fixture
def import_folder(line: Line, tmp_path: Path) -> Callable[..., None]:
    """Return a function that imports a folder of Harbor tasks as a task set."""

    def import_as(name: str, folder: Path, environment: str = "terminal") -> None:
        line.stack.manage(
            "import_tasks", "harbor", str(folder), "--set", name, "--environment", environment
        )

    return import_as
