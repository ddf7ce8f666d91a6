"""A registry, a tiny root file system of busybox, and image stores over folders of their own."""

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from sandboxes.images.cache import CachedImage
from sandboxes.images.specs import ImageSpec
from sandboxes.images.store import ImageOptions, ImageStore
from sandboxes.models import Node
from sandboxes.runtime.account import Account, resolve_account
from sandboxes.runtime.argv import find_tools
from sandboxes.runtime.exceptions import RuntimeMissing
from sandboxes.services.node import close_node_runtime, node_runtime
from tests.sandbox.conftest import lacking, open_folder
from tests.sandbox.images.endless import working
from tests.sandbox.images.oci import free_port, running_registry

NEEDED = ("docker-registry", "skopeo", "busybox-static", "unsquashfs")


@dataclass
class Images:
    """A store, its root, and all that its work said."""

    root: Path
    store: ImageStore
    said: list[str] = field(default_factory=list)

    def get(self, source: str, *, timeout_seconds: float = 120.0, **values: Any) -> CachedImage:
        """Get an image; `again`, `cancelled` and `on_log` go to the store, the rest describes."""
        options = {n: values.pop(n) for n in ("again", "cancelled", "on_log") if n in values}
        spec = ImageSpec(**{"name": "image", "source": source, **values})
        options.setdefault("on_log", self.said.append)
        return self.store.get(spec, timeout_seconds=timeout_seconds, **options)

    def log(self) -> str:
        """Return what was said so far."""
        return "".join(self.said)

    def left(self) -> list[str]:
        """Return what a build that ended must not leave: work folders, and files of the engine."""
        found = [*self.root.glob("images/work-*"), *self.root.glob("tmp/work-*")]
        return sorted(str(path) for path in found)

    def kept(self) -> list[str]:
        """Return the digests of the images in the cache."""
        return sorted(path.name for path in self.root.glob("images/*") if path.is_dir())


MakeImages = Callable[..., Images]


@pytest.fixture(scope="session")
def account() -> Account:
    """Return the sandbox account; skips (fails in CI) where a tool is missing."""
    missing = [name for name in NEEDED if shutil.which(name) is None]
    if missing:
        lacking(f"no {', '.join(missing)}: run scripts/install-test-tools")
    try:
        find_tools()
        return resolve_account(None)
    except RuntimeMissing as fault:
        lacking(str(fault))
        raise


@pytest.fixture(scope="session")
def shared(account: Account) -> Iterator[Path]:
    """Yield a folder that the sandbox account can pass."""
    folder = open_folder("prorl-image-tests-")
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def registry(shared: Path) -> Iterator[str]:
    """Yield the host and port of a real registry."""
    with running_registry(shared / "registry", free_port()) as host:
        yield host


def make_rootfs(folder: Path) -> Path:
    """Make a root file system of busybox; every file belongs to whoever runs the tests."""
    binaries = folder / "bin"
    for name in ("bin", "etc", "proc", "sys", "dev", "tmp", "var/tmp", "root", "usr/bin"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    busybox = shutil.which("busybox-static")
    assert busybox is not None
    shutil.copy(busybox, binaries / "busybox")
    listed = subprocess.run([busybox, "--list"], check=True, capture_output=True, text=True)
    for name in listed.stdout.split():
        if name != "busybox":
            (binaries / name).symlink_to("busybox")
    (folder / "etc" / "passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    (folder / "hello").write_text("from the image\n")
    return folder


@pytest.fixture(scope="session")
def rootfs(shared: Path) -> Path:
    """Return a tiny root file system that nobody changes."""
    return make_rootfs(shared / "rootfs")


@pytest.fixture(scope="session")
def sif(shared: Path, rootfs: Path) -> Path:
    """Return a SIF of the tiny root file system."""
    path = shared / "tiny.sif"
    subprocess.run(
        [find_tools().engine, "build", str(path), str(rootfs)],
        check=True,
        capture_output=True,
        env={**os.environ, "APPTAINER_CONFIGDIR": str(shared / "engine")},
    )
    path.chmod(0o644)
    return path


@pytest.fixture
def make_images(account: Account, shared: Path) -> Iterator[MakeImages]:
    """Return a function that makes a store over a new folder; the folders are deleted."""
    made: list[Path] = []

    def make(root: Path | None = None, **options: Any) -> Images:
        folder = root or open_folder("prorl-image-store-") / "root"
        made.append(folder)
        filled = {"image_root": shared, "backoff_seconds": 0.05, "reserve_bytes": 0, **options}
        return Images(root=folder, store=ImageStore(folder, account, ImageOptions(**filled)))

    yield make
    for folder in made:
        shutil.rmtree(folder.parent, ignore_errors=True)


@pytest.fixture
def images(make_images: MakeImages) -> Images:
    """Return a store over a new folder."""
    return make_images()


@pytest.fixture
def node(db: None, account: Account, shared: Path, settings: Any) -> Iterator[Node]:
    """Be a node with a folder of its own."""
    folder = open_folder("prorl-image-node-")
    settings.SANDBOX_RUNTIME = "apptainer"
    settings.SANDBOX_ROOT = folder / "root"
    settings.IMAGE_ROOT = shared
    settings.NODE_NAME = "node"
    settings.DISK_RESERVE_BYTES = 0
    close_node_runtime()
    yield Node.objects.create(name="node", capacity=4)
    assert node_runtime().list() == []
    close_node_runtime()
    assert working(folder) == set()
    shutil.rmtree(folder)
