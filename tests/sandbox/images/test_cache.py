"""Eviction: the least recently used first, never what instances or layers lie upon."""

import os
from pathlib import Path

import pytest

from sandboxes.images.cache import ImageCache
from sandboxes.images.specs import ImageSpec
from sandboxes.runtime.account import Account
from sandboxes.runtime.apptainer import ApptainerRuntime
from sandboxes.runtime.protocol import SandboxSpec
from tests.sandbox.conftest import PREFIX
from tests.sandbox.images.conftest import Images, MakeImages
from tests.sandbox.images.test_builds import definition

pytestmark = pytest.mark.sandbox


def age(images: Images, digest: str, seconds: float) -> None:
    """Make an image's last use lie in the past."""
    record = images.root / "images" / f"{digest}.json"
    then = record.stat().st_mtime - seconds
    os.utime(record, (then, then))


def three(images: Images, sif: Path, rootfs: Path) -> list[str]:
    found = [
        images.get(str(sif)).digest,
        images.get(str(rootfs)).digest,
        images.get("definition:", definition=definition(sif, "echo 3 > /three")).digest,
    ]
    for place, digest in enumerate(found):
        age(images, digest, 1000.0 * (3 - place))
    return found


def test_the_least_recently_used_goes_first_and_use_is_noted(
    make_images: MakeImages, sif: Path, rootfs: Path
) -> None:
    images = make_images(grace_seconds=10.0)
    first, second, third = three(images, sif, rootfs)
    assert images.store.find(ImageSpec(name="image", source=str(sif))) is not None

    size = images.store.size()
    evicted = images.store.evict(keep_bytes=size - 1)

    assert evicted == 1
    assert images.kept() == sorted([first, third])
    assert images.store.find(ImageSpec(name="image", source=str(rootfs))) is None
    # The one that was just found is within the grace.
    assert images.store.evict(keep_bytes=0) == 1
    assert images.kept() == [first]
    assert images.get(str(rootfs)).digest == second
    assert images.store.size() < size


def test_what_instances_and_layers_lie_upon_stays(
    make_images: MakeImages, account: Account, sif: Path, rootfs: Path, base_image: Path
) -> None:
    images = make_images(grace_seconds=0.0)
    first, second, third = three(images, sif, rootfs)
    runtime = ApptainerRuntime(images.root, PREFIX, account)
    runtime.prepare()
    name, other = f"{PREFIX}uses", f"{PREFIX}freezes"
    folders = [str(images.root / "images" / digest) for digest in (first, second)]
    try:
        spec = SandboxSpec(name=name, image=folders[0], workdir="/")
        runtime.start(spec, timeout_seconds=60)
        frozen = runtime.start(
            SandboxSpec(name=other, image=folders[1], workdir="/"), timeout_seconds=60
        )
        layer = runtime.freeze(frozen)

        assert images.store.evict(keep_bytes=0) == 1
        assert images.kept() == sorted([first, second])
        runtime.stop(name)
        assert images.store.evict(keep_bytes=0) == 1
        assert images.kept() == [second]
        runtime.discard_layer(layer)
        assert images.store.evict(keep_bytes=0) == 1
        assert images.kept() == []
    finally:
        runtime.stop(name)
        runtime.close()
    assert third not in images.kept()


def test_getting_an_image_evicts_beyond_the_bound(
    make_images: MakeImages, sif: Path, rootfs: Path
) -> None:
    images = make_images(grace_seconds=0.0, cache_bytes=3_000_000)

    first, second = images.get(str(sif)).digest, images.get(str(rootfs)).digest

    assert images.kept() == [second]
    assert f"evicted {first}" in images.log()


def test_a_record_without_its_folder_and_a_folder_without_its_record_count_for_nothing(
    images: Images, sif: Path
) -> None:
    image = images.get(str(sif))
    spec = ImageSpec(name="image", source=str(sif))
    record = images.root / "images" / f"{image.digest}.json"
    record.unlink()
    assert images.store.find(spec) is None

    again = images.get(str(sif))

    assert (again.folder, again.reused) == (image.folder, False)
    Path(image.folder).rename(images.root / "tmp" / "elsewhere")
    assert images.store.find(spec) is None
    assert images.get(str(sif)).reused is False


def test_only_digests_are_looked_up(tmp_path: Path) -> None:
    cache = ImageCache(tmp_path)
    cache.make()
    (tmp_path / "secret.json").write_text('{"folder": "/"}')

    assert cache.get("../secret") is None
    assert cache.find("../../secret") is None
