"""The images of this node, as the rest of the service sees them."""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path

from sandboxes.images.cache import GRACE_SECONDS, CachedImage, ImageCache
from sandboxes.images.exceptions import ImageNetworkFault, ImageTimeout
from sandboxes.images.orders import Order
from sandboxes.images.references import locate, parse_source
from sandboxes.images.runner import POLL_SECONDS, OnLog, run_order
from sandboxes.images.specs import ImageSpec, request_key
from sandboxes.images.unpack import is_complete
from sandboxes.runtime.account import Account
from sandboxes.runtime.argv import HOST_PATH, engine_env, find_tools
from sandboxes.runtime.exceptions import RuntimeMissing, SandboxCancelled
from sandboxes.runtime.layout import make_root
from sandboxes.runtime.sessions import Cancelled

ENGINE_SETTINGS = ("TMPDIR", "CACHEDIR")


@dataclass(frozen=True, kw_only=True)
class ImageOptions:
    """Set how images are got; sizes in bytes.

    `tmp` and `engine_cache` are the engine's folders, which the sandbox account must be able to
    write (None: below the root). `insecure_registries` are reached without TLS, as those of this
    machine always are. A network fault is tried `tries` times in all. Beyond `cache_bytes`,
    images in no use are evicted; work stops when fewer than `reserve_bytes` of disk are left.
    """

    image_root: Path = Path("/")
    tmp: Path | None = None
    engine_cache: Path | None = None
    insecure_registries: tuple[str, ...] = ()
    cache_bytes: int = 200 * 1024**3
    engine_cache_bytes: int = 20 * 1024**3
    reserve_bytes: int = 1024**3
    tries: int = 3
    backoff_seconds: float = 2.0
    grace_seconds: float = GRACE_SECONDS


class ImageStore:
    """Find, get and evict images below `root`; any number of processes may do it at once."""

    def __init__(self, root: Path, account: Account, options: ImageOptions | None = None) -> None:
        self._root = root.absolute()
        self._account = account
        self._options = options or ImageOptions()
        self._cache = ImageCache(self._root)

    def find(self, spec: ImageSpec) -> CachedImage | None:
        """Return an image that is there, and note its use; None when it must be got first.

        Raises ReferenceInvalid. Reads and runs nothing of the image: a few file lookups.
        """
        spec = self._located(spec)
        path = Path(spec.parsed.value)
        if spec.work == "unpack" and is_complete(path, self._account.uid, self._account.gid):
            return CachedImage(folder=str(path), note="used where it is")
        try:
            return self._cache.find(request_key(spec))
        except OSError:
            return None

    def note_use(self, folder: Path) -> str:
        """Note that a cached image is used now; returns its digest, empty for another folder."""
        if folder.parent != self._cache.folder:
            return ""
        found = self._cache.get(folder.name)
        return found.digest if found else ""

    def get(
        self,
        spec: ImageSpec,
        *,
        timeout_seconds: float,
        again: bool = False,
        cancelled: Cancelled | None = None,
        on_log: OnLog | None = None,
    ) -> CachedImage:
        """Return an image, pulled, built or unpacked where it must be.

        `again` passes over what an earlier pull or scratch build left. Raises ReferenceInvalid,
        ImageMissing, ImageUnusable, ImagePullFailed, ImageBuildFailed, ImageNetworkFault,
        ImageTimeout, ImageDiskFull, ImageWorkLost, SandboxCancelled, RuntimeMissing.
        """
        spec = self._located(spec)
        spec.check()
        deadline = time.monotonic() + timeout_seconds
        order = replace(self._order(), spec=spec, again=again)
        for left in range(self._options.tries - 1, -1, -1):
            try:
                result = run_order(
                    order,
                    account=self._account,
                    timeout_seconds=max(0.0, deadline - time.monotonic()),
                    cancelled=cancelled,
                    on_log=on_log,
                )
            except ImageNetworkFault as fault:
                if not left:
                    raise
                pause = self._options.backoff_seconds * 4.0 ** (self._options.tries - 1 - left)
                if on_log is not None:
                    on_log(f"== {fault.code}: again in {pause:g} s, {left} tries left\n")
                _wait(pause, deadline, timeout_seconds, cancelled)
            else:
                return CachedImage.from_dict(result)
        raise AssertionError("the last try returns or raises")

    def evict(self, *, keep_bytes: int | None = None) -> int:
        """Delete images in no use beyond the bound, and what dead builds left; return how many."""
        order = self._order()
        if keep_bytes is not None:
            order = replace(order, keep_bytes=keep_bytes)
        result = run_order(order, account=self._account, timeout_seconds=600.0)
        return len(result["evicted"])

    def size(self) -> int:
        """Return the bytes that the cached images take."""
        return self._cache.size()

    def _located(self, spec: ImageSpec) -> ImageSpec:
        source = locate(parse_source(spec.source), self._options.image_root)
        return replace(spec, source=source.text)

    def _order(self) -> Order:
        tools = find_tools()
        unsquashfs = shutil.which("unsquashfs", path=HOST_PATH)
        if unsquashfs is None:
            raise RuntimeMissing("unsquashfs is missing: install squashfs-tools")
        make_root(self._root, self._account)
        options = self._options
        env = engine_env(self._root)
        folders = (options.tmp or self._root / "tmp", options.engine_cache or self._root / "tmp")
        for name, folder in zip(ENGINE_SETTINGS, folders, strict=True):
            env[f"APPTAINER_{name}"] = env[f"SINGULARITY_{name}"] = str(folder)
        # The SIF of a pull or build is unpacked at once and deleted: packing it small is a waste.
        env["APPTAINER_MKSQUASHFS_ARGS"] = "-noI -noD -noF -noX -no-duplicates"
        return Order(
            root=self._root,
            scratch=folders[0],
            env=env,
            engine=os.path.realpath(tools.engine),
            unsquashfs=unsquashfs,
            unshare=tools.unshare,
            spec=None,
            insecure=options.insecure_registries,
            keep_bytes=options.cache_bytes,
            engine_cache_bytes=options.engine_cache_bytes,
            reserve_bytes=options.reserve_bytes,
            grace_seconds=options.grace_seconds,
            image_root=str(options.image_root),
        )


def _wait(
    seconds: float, deadline: float, timeout_seconds: float, cancelled: Cancelled | None
) -> None:
    """Wait before another try; raises SandboxCancelled, ImageTimeout."""
    end = time.monotonic() + seconds
    if end > deadline:
        raise ImageTimeout(f"the image was not there within {timeout_seconds:g} s")
    while (left := end - time.monotonic()) > 0:
        if cancelled is not None and cancelled():
            raise SandboxCancelled("cancelled while waiting for a registry")
        time.sleep(min(left, POLL_SECONDS))
