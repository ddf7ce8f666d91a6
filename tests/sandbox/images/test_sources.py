"""Every kind of source becomes an unpacked image that a sandbox starts from."""

import hashlib
import os
import subprocess
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from sandboxes.images.digests import tree_digest
from sandboxes.images.exceptions import ImageNetworkFault, ImagePullFailed
from sandboxes.images.specs import ImageSpec
from sandboxes.runtime.account import Account
from sandboxes.runtime.apptainer import ApptainerRuntime
from sandboxes.runtime.argv import find_tools
from sandboxes.runtime.exceptions import ImageMissing, ImageUnusable
from tests.sandbox.conftest import Start
from tests.sandbox.images.conftest import Images, MakeImages, make_rootfs
from tests.sandbox.images.oci import (
    folder_members,
    free_port,
    member,
    push_image,
    running_registry,
)

pytestmark = pytest.mark.sandbox


@pytest.fixture(scope="module")
def reference(registry: str, rootfs: Path, shared: Path) -> str:
    """Return the reference of an image with two layers; the upper one changes the lower."""
    layers = [folder_members(rootfs), [member("upper", b"second layer\n"), member(".wh.hello")]]
    return push_image(registry, "tests/tiny:1", layers, shared)


@pytest.fixture(scope="module")
def pushed_sif(registry: str, sif: Path, shared: Path) -> str:
    """Return the reference of the tiny SIF, pushed as it is."""
    reference = f"{registry}/tests/sif:1"
    subprocess.run(
        [find_tools().engine, "push", "--no-https", "-U", str(sif), f"oras://{reference}"],
        check=True,
        capture_output=True,
        env={**os.environ, "APPTAINER_CONFIGDIR": str(shared / "engine")},
    )
    return reference


@pytest.fixture
def look(apptainer_runtime: ApptainerRuntime, start_apptainer: Start) -> Callable[[str, str], str]:
    """Return a function that runs a script in a sandbox started from a folder."""

    def run(folder: str, script: str) -> str:
        handle = start_apptainer(image=folder, workdir="/")
        result = apptainer_runtime.exec(handle, ["/bin/sh", "-c", script], timeout_seconds=60)
        assert result.exit_code == 0, result.stderr
        return result.stdout.decode()

    return run


def test_a_docker_image_is_pulled_from_a_registry_and_starts(
    images: Images, reference: str, look
) -> None:
    image = images.get(f"docker://{reference}")

    assert image.folder == f"{images.root}/images/{image.digest}"
    assert tree_digest(Path(image.folder))[0] == image.digest
    assert (image.reused, image.note) == (False, "")
    assert image.sif_bytes > 0
    assert look(image.folder, "cat /upper; test -e /hello || echo gone; id -u") == (
        "second layer\ngone\n0\n"
    )
    assert images.left() == []


def test_the_same_docker_image_has_the_same_digest_on_every_node(
    make_images: MakeImages, reference: str
) -> None:
    one, other = make_images(), make_images()

    assert one.get(f"docker://{reference}").digest == other.get(f"docker://{reference}").digest


def test_an_oras_image_is_the_very_sif_that_was_pushed(
    images: Images, pushed_sif: str, sif: Path
) -> None:
    image = images.get(f"oras://{pushed_sif}")

    assert image.digest == hashlib.sha256(sif.read_bytes()).hexdigest()
    assert image.sif_bytes == sif.stat().st_size
    # The same content from elsewhere is the same image.
    assert images.get(str(sif)).folder == image.folder
    assert images.kept() == [image.digest]


def test_what_was_pulled_is_used_until_it_is_pulled_again(
    images: Images, registry: str, rootfs: Path, shared: Path
) -> None:
    spec = ImageSpec(name="moving", source=f"docker://{registry}/tests/moving:1")
    push_image(registry, "tests/moving:1", [folder_members(rootfs)], shared)
    assert images.store.find(spec) is None
    first = images.get(spec.source)
    newer = [*folder_members(rootfs), member("newer", b"2")]
    push_image(registry, "tests/moving:1", [newer], shared)

    kept, found = images.get(spec.source), images.store.find(spec)
    second = images.get(spec.source, again=True)

    assert (kept.digest, kept.reused) == (first.digest, True)
    assert found is not None
    assert found.folder == first.folder
    assert (Path(second.folder) / "newer").read_text() == "2"
    assert images.store.find(spec) == second
    assert images.kept() == sorted([first.digest, second.digest])


def test_an_unknown_image_is_asked_for_once(images: Images, registry: str) -> None:
    with pytest.raises(ImagePullFailed, match="manifest unknown"):
        images.get(f"docker://{registry}/tests/unknown:1")

    assert images.log().count("== pull: ") == 1
    assert (images.kept(), images.left()) == ([], [])


def test_a_registry_that_is_away_is_asked_three_times(images: Images) -> None:
    with pytest.raises(ImageNetworkFault, match="connection refused"):
        images.get(f"docker://127.0.0.1:{free_port()}/tests/tiny:1")

    assert images.log().count("== pull: ") == 3
    assert "1 tries left" in images.log()


def test_a_registry_that_comes_back_between_two_tries_serves(
    images: Images, rootfs: Path, shared: Path, tmp_path: Path
) -> None:
    port = free_port()
    with running_registry(shared / "late", port) as host:
        push_image(host, "tests/late:1", [folder_members(rootfs)], tmp_path)
    with ExitStack() as stack:

        def come_back(text: str) -> None:
            images.said.append(text)
            if "2 tries left" in text:
                stack.enter_context(running_registry(shared / "late", port))

        image = images.get(f"docker://127.0.0.1:{port}/tests/late:1", on_log=come_back)

    assert (Path(image.folder) / "hello").read_text() == "from the image\n"


def test_a_root_file_system_is_copied_completed_and_left_as_it_is(
    images: Images, tmp_path: Path, account: Account, look
) -> None:
    tmp_path.chmod(0o755)
    for parent in tmp_path.parents[:2]:
        parent.chmod(0o755)
    source = make_rootfs(tmp_path / "rootfs")
    (source / "locked").mkdir(mode=0o755)
    os.link(source / "hello", source / "locked" / "same")
    (source / "locked").chmod(0o555)
    (source / "suid").write_text("x")
    (source / "suid").chmod(0o4755)
    before = tree_digest(source)

    image = images.get(str(source))

    copy = Path(image.folder)
    assert tree_digest(source) == before
    assert not (source / ".singularity.d").exists()
    owners = {(path.lstat().st_uid, path.lstat().st_gid) for path in copy.rglob("*")}
    assert owners == {(account.uid, account.gid)}
    assert (copy / "suid").stat().st_mode & 0o7777 == 0o4755
    assert (copy / "hello").stat().st_ino == (copy / "locked" / "same").stat().st_ino
    assert look(image.folder, "cat /hello; rm -r /locked && ls -d /locked 2>&1 | wc -l") == (
        "from the image\n1\n"
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="an ordinary user owns what it copies")
def test_what_the_account_cannot_read_is_left_out_and_named(images: Images, tmp_path: Path) -> None:
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    source = make_rootfs(tmp_path / "rootfs")
    (source / "etc" / "shadow").write_text("root:*:1:0:99999:7:::\n")
    (source / "etc" / "shadow").chmod(0o600)
    (source / "root" / "private").mkdir(mode=0o700)

    image = images.get(str(source))

    assert image.note == (
        "left out, since the sandbox account cannot read or make them: /root/private, /etc/shadow"
    )
    assert not (Path(image.folder) / "etc" / "shadow").exists()


def test_an_unpacked_image_of_the_account_is_used_where_it_is(
    images: Images, base_image: Path
) -> None:
    spec = ImageSpec(name="base", source=str(base_image))

    image = images.get(str(base_image))

    found = images.store.find(spec)
    assert found is not None
    assert (image.folder, found.folder) == (str(base_image), str(base_image))
    assert image.digest == tree_digest(base_image)[0]
    assert images.kept() == []


@pytest.mark.parametrize(
    ("name", "fault", "why"),
    [
        ("absent.sif", ImageMissing, "no image"),
        ("empty", ImageUnusable, "no bin/sh"),
        ("text.sif", ImageUnusable, "neither a SIF"),
        ("cut.sif", ImageUnusable, "cut off"),
        ("holed.sif", ImageUnusable, "could not be unpacked"),
    ],
)
def test_what_is_no_image_is_refused_and_leaves_nothing(
    images: Images, sif: Path, shared: Path, name: str, fault: type[Exception], why: str
) -> None:
    whole = sif.read_bytes()
    (shared / "empty").mkdir(exist_ok=True)
    (shared / "text.sif").write_text("x" * 1000)
    (shared / "cut.sif").write_bytes(whole[: len(whole) // 2])
    middle = len(whole) // 2
    (shared / "holed.sif").write_bytes(whole[:middle] + bytes(200_000) + whole[middle + 200_000 :])

    with pytest.raises(fault, match=why):
        images.get(name)

    assert (images.kept(), images.left()) == ([], [])
