"""Definition files and templates, built as an ordinary user with a root-mapped namespace."""

import http.server
import os
import subprocess
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from sandboxes.images.exceptions import ImageBuildFailed
from tests.sandbox.images.conftest import Images
from tests.sandbox.images.oci import folder_members, free_port, push_image

pytestmark = pytest.mark.sandbox


def definition(base: Path | str, post: str = "true", bootstrap: str = "localimage") -> str:
    return f"Bootstrap: {bootstrap}\nFrom: {base}\n\n%post\n    {post}\n"


def read(image_folder: str, path: str) -> str:
    return (Path(image_folder) / path).read_text()


def test_a_definition_is_built_with_its_files_from_a_local_image(images: Images, sif: Path) -> None:
    text = (
        f"Bootstrap: localimage\nFrom: {sif}\n"
        "%files\n    notes/one.txt /opt/one.txt\n"
        "%post\n    id -u > /who; cat /hello /opt/one.txt > /both\n"
        "%environment\n    export GREETING=hello\n"
    )

    image = images.get("definition:", definition=text, files={"notes/one.txt": "beside\n"})

    assert read(image.folder, "who") == "0\n"
    assert read(image.folder, "both") == "from the image\nbeside\n"
    assert "GREETING=hello" in read(image.folder, ".singularity.d/env/90-environment.sh")
    assert images.left() == []


def test_a_definition_is_built_from_a_registry_and_from_scratch(
    images: Images, registry: str, rootfs: Path, shared: Path
) -> None:
    reference = push_image(registry, "tests/base:1", [folder_members(rootfs)], shared)
    from_registry = definition(reference, "echo post > /post", bootstrap="docker")
    from_scratch = (
        "Bootstrap: scratch\n"
        f"%setup\n    cp -R {rootfs}/. $APPTAINER_ROOTFS/\n"
        "%post\n    echo post > /post\n"
    )

    found = [images.get("definition:", definition=text) for text in (from_registry, from_scratch)]

    assert [read(image.folder, "hello") for image in found] == ["from the image\n"] * 2
    assert [read(image.folder, "post") for image in found] == ["post\n"] * 2


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("Bootstrap: debootstrap\nMirrorURL: http://x\nOSVersion: bookworm\n", "needs a real root"),
        ("Bootstrap: docker\n%post\n    true\n", "needs a line 'From"),
        ("%post\n    true\n", "begins with 'Bootstrap"),
        ("Bootstrap: localimage\nFrom: /nowhere.sif\n", "nowhere"),
        ("Bootstrap: scratch\n%setup\n    exit 7\n", "exit status 7"),
    ],
)
def test_a_broken_definition_fails_once_and_says_why(images: Images, text: str, why: str) -> None:
    with pytest.raises(ImageBuildFailed, match=why):
        images.get("definition:", definition=text)

    assert images.log().count("== build: ") == 1
    assert (images.kept(), images.left()) == ([], [])


def test_a_post_section_that_fails_fails_the_build(images: Images, sif: Path) -> None:
    with pytest.raises(ImageBuildFailed, match="exit status 3"):
        images.get("definition:", definition=definition(sif, "exit 3"))


def test_a_folder_to_start_from_must_be_the_accounts(images: Images, rootfs: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("the folder belongs to the account")

    with pytest.raises(ImageBuildFailed, match="must belong to the sandbox account"):
        images.get("definition:", definition=definition(rootfs))


TEMPLATE = definition("{{ image_root }}/tiny.sif", "echo {{ word | word }} > /word")


def test_versioned_builds_again_only_what_changed(images: Images, sif: Path) -> None:
    def get(word: str, text: str = TEMPLATE) -> tuple[str, bool]:
        image = images.get(
            "template:", definition=text, parameters={"word": word}, again=True, name=word
        )
        return read(image.folder, "word"), image.reused

    assert get("a b") == ("a b\n", False)
    assert get("a b") == ("a b\n", True)
    assert get("$(id)") == ("$(id)\n", False)
    assert get("a b", TEMPLATE + "    # rendered too\n") == ("a b\n", False)
    # Another template: what is rendered is the same.
    assert get("a b", "{# not rendered #}" + TEMPLATE) == ("a b\n", True)


def test_scratch_builds_again_whenever_it_is_asked_for(images: Images, sif: Path) -> None:
    def get(again: bool) -> bool:
        text = definition(sif, "true")
        return images.get("definition:", definition=text, reuse="scratch", again=again).reused

    assert [get(True), get(False), get(True)] == [False, True, False]


def test_lock_reuses_whatever_changed_while_the_lock_is_the_same(images: Images, sif: Path) -> None:
    def get(word: str, lock: str) -> tuple[str, bool]:
        text = definition(sif, f"echo {word} > /word")
        image = images.get("definition:", definition=text, reuse="lock", lock=lock, again=True)
        return read(image.folder, "word"), image.reused

    assert get("one", "l1") == ("one\n", False)
    assert get("two", "l1") == ("one\n", True)
    assert get("two", "l2") == ("two\n", False)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{% for i in range(10**9) %}{% endfor %}", "Range too big"),
        ("{{ 'x' * 10**10 }}", "wants too much|ate its memory"),
        ("{{ 7 ** (10 ** 9) }}", "did not end"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{% import '/etc/passwd' as x %}", "no loader"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ cycler.__init__.__globals__ }}", "unsafe"),
        ("{{ missing }}", "undefined"),
        ("{{ 'a\\n%post' | word }}", "one line"),
        ("{% broken", "rendered"),
    ],
)
def test_a_hostile_template_ends_in_time_and_reads_nothing(
    images: Images, text: str, why: str
) -> None:
    with pytest.raises(ImageBuildFailed, match=why):
        images.get("template:", definition=f"Bootstrap: scratch\n{text}")

    assert images.kept() == []


@pytest.fixture
def repository(tmp_path: Path) -> Iterator[tuple[str, str]]:
    """Serve a git repository over HTTP; yields its address and its first commit."""
    work, served = tmp_path / "work", tmp_path / "served"
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]

    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", *identity, *words], cwd=work, check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    work.mkdir()
    git("init", "--quiet")
    (work / "code.py").write_text("print('first')\n")
    git("add", ".")
    git("commit", "--quiet", "-m", "first")
    first = git("rev-parse", "HEAD")
    (work / "code.py").write_text("print('second')\n")
    git("commit", "--quiet", "-am", "second")
    git("clone", "--quiet", "--bare", str(work), str(served / "repo.git"))
    subprocess.run(["git", "update-server-info"], cwd=served / "repo.git", check=True)
    handler = partial(_QuietHandler, directory=str(served))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", free_port()), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/repo.git", first
    server.shutdown()
    thread.join()
    server.server_close()


class _QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Say nothing."""


def test_the_repository_template_makes_an_image_of_a_commit(
    images: Images, repository: tuple[str, str], base_image: Path
) -> None:
    address, commit = repository

    image = images.get(
        "template:repository",
        parameters={
            "bootstrap": "localimage",
            "base": str(base_image),
            "repository": address,
            "commit": commit,
            "workdir": "/src/my code",
            "install": ["python3 code.py > /ran", 'echo "$MODE" >> /ran'],
            "environment": {"MODE": "fast $HOME"},
        },
    )

    assert read(image.folder, "src/my code/code.py") == "print('first')\n"
    assert read(image.folder, "ran") == "first\nfast $HOME\n"
    assert "MODE='fast $HOME'" in read(image.folder, ".singularity.d/env/90-environment.sh")
    assert read(image.folder, "src/my code/.git/HEAD").strip() == commit
