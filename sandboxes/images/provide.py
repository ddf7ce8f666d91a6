"""Get one image into the node's cache; run as the sandbox account, in a process of its own."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from sandboxes.images import engine
from sandboxes.images.cache import CachedImage, ImageCache, work_folder
from sandboxes.images.definitions import check_stages, read_stages, wants_plain_http
from sandboxes.images.digests import file_digest, tree_bytes, tree_digest
from sandboxes.images.exceptions import ImageDiskFull
from sandboxes.images.orders import Order
from sandboxes.images.references import REMOTE, is_plain_http
from sandboxes.images.specs import ImageSpec, request_key, version_key
from sandboxes.images.templates import render_bounded, shipped_template
from sandboxes.images.unpack import copy_rootfs, forget_day, is_complete, unpack_sif
from sandboxes.runtime.exceptions import (
    ImageMissing,
    ImageUnusable,
    RuntimeMissing,
    SandboxFault,
)
from sandboxes.runtime.layout import Layout


class DiskWatch(Protocol):
    """Stop the work before the disk is full; what was stopped fails in its own words."""

    def stopped(self) -> bool:
        """Tell whether the work was stopped because the disk is nearly full."""
        ...

    def spared(self) -> AbstractContextManager[None]:
        """Stop nothing meanwhile: what was left is being deleted."""
        ...

    def go_on(self) -> None:
        """Watch again, from now on; raises ImageDiskFull when there is still no room."""
        ...


def carry_out(order: Order, *, begin: Callable[[], DiskWatch]) -> dict[str, Any]:
    """Do what an order says; returns the image, and the digests of those that were evicted.

    Calls `begin` once threads may start: a template is rendered before, in a forked child.
    """
    spec = order.spec
    definition = _definition(order) if spec and spec.work == "build" else ""
    watch = begin()
    Layout(order.root).make()
    for folder in {order.scratch, Path(order.env["APPTAINER_CACHEDIR"])}:
        if not os.access(folder, os.W_OK | os.X_OK):
            raise RuntimeMissing(f"the sandbox account cannot write the engine's folder {folder}")
    cache = ImageCache(order.root)
    cache.make()

    def remove(folder: Path) -> None:
        with watch.spared():
            remove_folder(folder, unshare=order.unshare)

    cache.sweep(remove, order.scratch)
    image = _Provider(order, spec, definition, cache, remove, watch).get() if spec else None
    evicted = cache.evict(
        remove=remove, keep_bytes=order.keep_bytes, grace_seconds=order.grace_seconds
    )
    for key in evicted:
        say(f"evicted {key}")
    return {**(asdict(image) if image else {}), "evicted": evicted}


def say(text: str) -> None:
    """Write a line of our own into the log."""
    sys.stdout.write(f"== {text}\n")
    sys.stdout.flush()


def remove_folder(folder: Path, *, unshare: str) -> None:
    """Delete a folder as root of a user namespace: modes of 000 inside do not stop it."""
    subprocess.run(
        [unshare, "-U", "-r", "--", "/bin/rm", "-rf", "--one-file-system", "--", str(folder)],
        stdin=subprocess.DEVNULL,
        check=False,
    )


def _definition(order: Order) -> str:
    """Return the definition to build, rendered where it is a template; raises ImageBuildFailed."""
    spec = order.spec
    assert spec is not None
    source = spec.parsed
    if source.kind == "definition":
        return spec.definition
    text = shipped_template(source.value) if source.value else spec.definition
    values = {"image_root": order.image_root, "name": spec.name, **spec.parameters}
    return render_bounded(text, values)


def _is_full(fault: Exception) -> bool:
    return isinstance(fault, ImageDiskFull) or (
        isinstance(fault, OSError) and fault.errno in (errno.ENOSPC, errno.EDQUOT)
    )


class _Provider:
    """Get one image: find it, or be the one on this node who makes it."""

    def __init__(
        self,
        order: Order,
        spec: ImageSpec,
        definition: str,
        cache: ImageCache,
        remove: Callable[[Path], None],
        watch: DiskWatch,
    ) -> None:
        self._watch = watch
        self._order = order
        self._spec = spec
        self._source = spec.parsed
        self._definition = definition
        self._cache = cache
        self._remove = remove

    def get(self) -> CachedImage:
        """Return the image; the others of this node who want it wait on a lock meanwhile."""
        self._spec.check()
        path = Path(self._source.value)
        if self._source.kind == "path":
            if not path.exists():
                raise ImageMissing(f"no image {path} on this node")
            if path.is_dir() and is_complete(path, os.geteuid(), os.getegid()):
                return self._in_place(path)
        try:
            request = request_key(self._spec)
        except OSError as fault:
            raise ImageUnusable(f"{path} cannot be read: {fault.strerror}") from None
        before = self._cache.asked_at(request)
        say(f"{self._spec.work}: {self._source.text}")
        with self._cache.locked(request):
            found = self._find_made(request, before)
            if found is None:
                found = self._make(request)
        return found

    def _in_place(self, path: Path) -> CachedImage:
        say(f"reading {path}")
        digest, size = tree_digest(path)
        return CachedImage(
            folder=str(path), digest=digest, image_bytes=size, note="used where it is"
        )

    def _find_made(self, request: str, before: float) -> CachedImage | None:
        """Return what is there and fresh enough: what another made while we waited always is."""
        found = self._cache.find(request)
        if found is None and self._spec.work == "build" and self._spec.reuse == "versioned":
            found = self._cache.find(self._version())
            if found is not None:
                self._cache.remember(request, found.digest)
        if found is None:
            return None
        if self._order.again and self._is_made_again() and self._cache.asked_at(request) == before:
            return None
        say(f"present: {found.folder}")
        return replace(found, reused=True)

    def _is_made_again(self) -> bool:
        """Tell whether asking explicitly means to make it again: what may differ by now."""
        if self._source.kind == "path":
            return Path(self._source.value).is_dir()
        return self._source.kind in REMOTE or self._spec.reuse == "scratch"

    def _version(self) -> str:
        return version_key(self._definition, self._spec.files)

    def _make(self, request: str) -> CachedImage:
        with ExitStack() as stack:
            work = stack.enter_context(work_folder(self._cache.folder, self._remove))
            scratch = stack.enter_context(work_folder(self._order.scratch, self._remove))
            env = dict(self._order.env)
            for name in ("APPTAINER_TMPDIR", "SINGULARITY_TMPDIR"):
                env[name] = os.environ[name] = str(scratch)
            try:
                image = self._made(work, env)
            except (SandboxFault, OSError) as fault:
                if not (self._watch.stopped() or _is_full(fault)):
                    raise
                # Downloads and unused images are worth less than this one; then once more.
                self._make_room(work, env)
                image = self._made(work, env)
            kept = self._cache.add(work / "part", image)
        self._cache.remember(request, kept.digest)
        if self._spec.work == "build" and self._spec.reuse == "versioned":
            self._cache.remember(self._version(), kept.digest)
        say(f"made: {kept.folder}")
        return kept

    def _made(self, work: Path, env: Mapping[str, str]) -> CachedImage:
        """Leave the unpacked image in `work`/part."""
        part = work / "part"
        path = Path(self._source.value)
        if self._source.kind == "path":
            if path.is_dir():
                note = copy_rootfs(path, part)
                digest, size = tree_digest(part)
                return CachedImage(folder="", digest=digest, image_bytes=size, note=note)
            return self._unpacked(path, part, env, as_it_came=True)
        if self._source.kind in REMOTE:
            plain = is_plain_http(self._source.registry, self._order.insecure)
            sif = engine.pull(self._source, work, engine=self._order.engine, plain_http=plain)
        else:
            sif = self._built(work, env)
        # A conversion has the day in it: only its content is the same on every node.
        as_it_came = self._source.kind in ("oras", "library")
        image = self._unpacked(sif, part, env, as_it_came=as_it_came)
        sif.unlink()
        self._trim_engine_cache(env)
        return image

    def _built(self, work: Path, env: Mapping[str, str]) -> Path:
        stages = read_stages(self._definition)
        check_stages(stages)
        plain = wants_plain_http(stages, self._order.insecure)
        context = work / "context"
        context.mkdir()
        for name, text in self._spec.files.items():
            (context / name).parent.mkdir(parents=True, exist_ok=True)
            (context / name).write_text(text)
        (context / ".image.def").write_text(self._definition)
        return engine.build(
            context / ".image.def",
            work,
            engine=self._order.engine,
            unshare=self._order.unshare,
            env=env,
            plain_http=plain,
        )

    def _unpacked(
        self, sif: Path, part: Path, env: Mapping[str, str], *, as_it_came: bool
    ) -> CachedImage:
        try:
            before = sif.stat()
            digest = file_digest(sif) if as_it_came else ""
        except PermissionError:
            raise ImageUnusable(f"the sandbox account cannot read {sif}") from None
        note = unpack_sif(
            sif,
            part,
            unsquashfs=self._order.unsquashfs,
            run=partial(engine.run_logged, env=env),
        )
        after = sif.stat()
        if (before.st_ino, before.st_size, before.st_mtime_ns) != (
            *(after.st_ino, after.st_size, after.st_mtime_ns),
        ):
            raise ImageUnusable(f"{sif} changed while it was read")
        if digest:
            size = tree_bytes(part)
        else:
            forget_day(part)
            digest, size = tree_digest(part)
        return CachedImage(
            folder="",
            digest=digest,
            image_bytes=size,
            sif_bytes=before.st_size,
            note=note,
        )

    def _make_room(self, work: Path, env: Mapping[str, str]) -> None:
        """Delete what this try left, the engine's downloads, and images in no use."""
        say("the disk is full: making room")
        for name in ("image.sif", "programs", "context", "part"):
            self._remove(work / name)
        engine.clean_engine_cache(self._order.engine, env)
        evicted = self._cache.evict(
            remove=self._remove, keep_bytes=0, grace_seconds=self._order.grace_seconds
        )
        say(f"{len(evicted)} images evicted")
        self._watch.go_on()

    def _trim_engine_cache(self, env: Mapping[str, str]) -> None:
        """Empty the engine's downloads when they grew beyond their share."""
        folder = env["APPTAINER_CACHEDIR"]
        total = sum(
            os.lstat(os.path.join(base, name)).st_size  # noqa: PTH118
            for base, _, names in os.walk(os.path.join(folder, "cache"))  # noqa: PTH118
            for name in names
        )
        if total > self._order.engine_cache_bytes:
            engine.clean_engine_cache(self._order.engine, env)
