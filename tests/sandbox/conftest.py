"""Real sandboxes for the tests: the base image, and one runtime per kind."""

import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import pytest

from sandboxes.runtime.account import resolve_account
from sandboxes.runtime.apptainer import ApptainerRuntime
from sandboxes.runtime.argv import Overlay, Tools, find_tools
from sandboxes.runtime.exceptions import RuntimeMissing
from sandboxes.runtime.factory import make_runtime
from sandboxes.runtime.protocol import Limits, Runtime, SandboxHandle, SandboxSpec

REPOSITORY = Path(__file__).resolve().parents[2]
PREFIX = "test-"

Start = Callable[..., SandboxHandle]


def lacking(reason: str) -> None:
    """Skip on a laptop, fail in CI: a suite that silently skips proves nothing."""
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


def open_folder(prefix: str) -> Path:
    """Make a temporary folder that the sandbox account can pass."""
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    folder.chmod(0o755)
    return folder


def remove_folder(folder: Path) -> None:
    """Delete a runtime's folder once what `stop` deletes after its answer is gone."""
    deadline = time.monotonic() + 60
    while list(folder.glob("root/trash/*")) and time.monotonic() < deadline:
        time.sleep(0.02)
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def base_image() -> Path:
    """Return the unpacked base image; skips (fails in CI) without it or Apptainer."""
    try:
        chosen_tools()
        resolve_account(None)
    except RuntimeMissing as fault:
        lacking(str(fault))
    image = Path(os.environ.get("PRORL_BASE_IMAGE", REPOSITORY / "var" / "images" / "base"))
    if not (image / ".singularity.d" / "digest").is_file():
        lacking(f"no base image at {image}: run scripts/build-base-image")
    return image.absolute()


@pytest.fixture(scope="session")
def apptainer_runtime(base_image: Path) -> Iterator[ApptainerRuntime]:
    """Yield a real runtime over a folder of its own; nothing of it stays."""
    with runtime_with(chosen_tools()) as made:
        yield made


def chosen_tools(overlay: Overlay | None = None) -> Tools:
    """Find the tools; PRORL_ENGINE and PRORL_OVERLAY choose others for all tests here."""
    wanted = overlay or cast(Overlay, os.environ.get("PRORL_OVERLAY", "auto"))
    return find_tools(engine=os.environ.get("PRORL_ENGINE", ""), overlay=wanted)


@contextmanager
def runtime_with(tools: Tools) -> Iterator[ApptainerRuntime]:
    """Make a runtime that uses those tools, over a folder of its own; nothing of it stays."""
    folder = open_folder("prorl-sandbox-tests-")
    account = resolve_account(None)
    made = ApptainerRuntime(
        folder / "root", PREFIX, account, engine=tools.engine, overlay=tools.overlay
    )
    made.prepare()
    try:
        yield made
        for name in made.list():
            made.stop(name)
    finally:
        made.close()
        remove_folder(folder)


@pytest.fixture(scope="session", params=["kernel", "fuse"])
def overlay_runtime(request: pytest.FixtureRequest, base_image: Path) -> Iterator[ApptainerRuntime]:
    """Yield a runtime for each driver of the overlay."""
    try:
        tools = chosen_tools(request.param)
    except RuntimeMissing as fault:
        lacking(str(fault))
    with runtime_with(tools) as made:
        yield made


@pytest.fixture
def start_overlay(overlay_runtime: ApptainerRuntime, base_image: Path) -> Iterator[Start]:
    """Start sandboxes on each driver of the overlay; they are stopped afterwards."""
    made: list[str] = []
    yield starter(overlay_runtime, str(base_image), made)
    for name in made:
        overlay_runtime.stop(name)


@pytest.fixture(scope="module")
def hostile(apptainer_runtime: ApptainerRuntime, base_image: Path) -> Iterator[SandboxHandle]:
    """Keep one sandbox for all tries of a module to get out of it."""
    made: list[str] = []
    yield starter(apptainer_runtime, str(base_image), made)()
    apptainer_runtime.stop(made[0])


@pytest.fixture(scope="session")
def local_runtime() -> Iterator[Runtime]:
    """Yield a runtime without isolation."""
    folder = open_folder("prorl-local-tests-")
    made = make_runtime("local", folder / "root", PREFIX, None)
    yield made
    for name in made.list():
        made.stop(name)
    made.close()
    remove_folder(folder)


@pytest.fixture
def fake_runtime(tmp_path: Path) -> Runtime:
    """Return the runtime that runs nothing."""
    return make_runtime("fake", tmp_path / "node", PREFIX, None)


# For what needs no program to run: the scripted runtime keeps these promises too.
every_runtime = pytest.mark.parametrize(
    "runtime",
    [pytest.param("apptainer", marks=pytest.mark.sandbox), "local", "fake"],
    indirect=True,
)


@pytest.fixture(params=[pytest.param("apptainer", marks=pytest.mark.sandbox), "local"])
def runtime(request: pytest.FixtureRequest) -> Runtime:
    """Return each runtime that runs real processes."""
    found: Runtime = request.getfixturevalue(f"{request.param}_runtime")
    return found


def starter(runtime: Runtime, image: str, made: list[str]) -> Start:
    """Return a function that starts a sandbox and remembers its name."""

    def start(**changes: object) -> SandboxHandle:
        name = f"{PREFIX}{uuid.uuid4().hex[:12]}"
        values: dict[str, object] = {
            "name": name,
            "image": image,
            "limits": Limits(lifetime_seconds=600),
        }
        values |= changes
        spec = SandboxSpec(**values)  # type: ignore[arg-type]
        made.append(spec.name)
        return runtime.start(spec, timeout_seconds=60)

    return start


@pytest.fixture
def image(request: pytest.FixtureRequest, runtime: Runtime) -> str:
    """Return the image for the runtime under test; the local one needs none."""
    isolated = isinstance(runtime, ApptainerRuntime)
    return str(request.getfixturevalue("base_image")) if isolated else ""


@pytest.fixture
def start(runtime: Runtime, image: str) -> Iterator[Start]:
    """Start sandboxes of the runtime under test; they are stopped afterwards."""
    made: list[str] = []
    yield starter(runtime, image, made)
    for name in made:
        runtime.stop(name)


@pytest.fixture
def start_apptainer(apptainer_runtime: ApptainerRuntime, base_image: Path) -> Iterator[Start]:
    """Start Apptainer sandboxes; they are stopped afterwards."""
    made: list[str] = []
    yield starter(apptainer_runtime, str(base_image), made)
    for name in made:
        apptainer_runtime.stop(name)
