"""What a source means, and what is refused before anything runs."""

from pathlib import Path

import pytest

from sandboxes.images.exceptions import ReferenceInvalid
from sandboxes.images.references import (
    Source,
    is_plain_http,
    locate,
    parse_source,
    registry_of,
)

DIGEST = "sha256:" + "0" * 64


@pytest.mark.parametrize(
    ("text", "kind", "value", "registry"),
    [
        ("docker://debian", "docker", "debian", "docker.io"),
        ("docker://debian:bookworm-slim", "docker", "debian:bookworm-slim", "docker.io"),
        ("docker://team/image", "docker", "team/image", "docker.io"),
        ("docker://localhost/image", "docker", "localhost/image", "localhost"),
        ("docker://127.0.0.1:5000/a/b:1", "docker", "127.0.0.1:5000/a/b:1", "127.0.0.1:5000"),
        ("docker://[::1]:5000/a", "docker", "[::1]:5000/a", "[::1]:5000"),
        (f"docker://ghcr.io/a/b@{DIGEST}", "docker", f"ghcr.io/a/b@{DIGEST}", "ghcr.io"),
        ("docker://x.org/swebench/sweb.eval.x86_64.a__b-1:v1", "docker",
         "x.org/swebench/sweb.eval.x86_64.a__b-1:v1", "x.org"),
        ("oras://registry.example.org/a:1", "oras", "registry.example.org/a:1",
         "registry.example.org"),
        ("library://lolcow", "library", "lolcow", "docker.io"),
    ],
)  # fmt: skip
def test_references_of_registries(text: str, kind: str, value: str, registry: str) -> None:
    source = parse_source(text)

    assert (source.kind, source.value, source.registry) == (kind, value, registry)
    assert source.text == text


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("base", "path", "base"),
        ("/images/a b.sif", "path", "/images/a b.sif"),
        ("definition:", "definition", ""),
        ("template:", "template", ""),
        ("template:python", "template", "python"),
    ],
)
def test_other_sources(text: str, kind: str, value: str) -> None:
    source = parse_source(text)

    assert (source.kind, source.value, source.text) == (kind, value, text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " base",
        "base\n",
        "a\x00b",
        "-base",
        "--name=x",
        "../base",
        "/images/../../etc",
        "x" * 501,
        "docker://",
        "docker://-oProxyCommand=x",
        "docker://host/-image",
        "docker://host/image name",
        "docker://host/image;id",
        "docker://host/$(id)",
        "docker://host/image\n",
        "docker://host/../image",
        "docker://Upper",
        "docker://host:port/image",
        "docker://user@host/image",
        f"docker://image@{DIGEST}0",
        "oras://host/image tag",
        "shub://a/b",
        "https://host/a.sif",
        "docker-daemon:image",
        "DOCKER://image",
        "template:Python",
        "template:../x",
    ],
)
def test_what_names_no_source_is_refused(text: str) -> None:
    if text == "docker-daemon:image":
        assert parse_source(text).kind == "path"
        return
    with pytest.raises(ReferenceInvalid):
        parse_source(text)


def test_a_long_reference_is_read_in_no_time() -> None:
    for text in (
        "docker://" + "a-" * 245 + "!",
        "docker://" + "a/" * 245,
        "docker://" + "a." * 245,
    ):
        with pytest.raises(ReferenceInvalid):
            parse_source(text)


def test_a_relative_path_is_below_the_image_root() -> None:
    root = Path("/var/images")

    assert locate(parse_source("base"), root) == Source(kind="path", value="/var/images/base")
    assert locate(parse_source("/x/a.sif"), root).value == "/x/a.sif"
    assert locate(parse_source("docker://base"), root).value == "base"


@pytest.mark.parametrize(
    ("registry", "plain"),
    [
        ("localhost", True),
        ("localhost:5000", True),
        ("127.0.0.1", True),
        ("127.8.9.1:5000", True),
        ("[::1]:5000", True),
        ("registry.lab:5000", True),
        ("other.lab:443", True),
        ("registry.lab", False),
        ("localhost.example.org", False),
        ("docker.io", False),
        ("10.0.0.1:5000", False),
    ],
)
def test_only_registries_here_or_listed_are_reached_without_tls(registry: str, plain: bool) -> None:
    assert is_plain_http(registry, ("registry.lab:5000", "other.lab")) is plain


def test_the_first_word_is_a_host_only_with_a_dot_or_a_port() -> None:
    assert [registry_of(text) for text in ("a/b", "a.b/c", "a:1/b", "localhost/a", "a")] == [
        *("", "a.b", "a:1", "localhost", ""),
    ]
