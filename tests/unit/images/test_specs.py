"""Keys under which a node finds an image again, and what no definition may be."""

import os
from pathlib import Path
from typing import Any

import pytest

from sandboxes.images.definitions import check_stages, read_stages, wants_plain_http
from sandboxes.images.digests import tree_digest
from sandboxes.images.engine import pull_fault
from sandboxes.images.exceptions import (
    ImageBuildFailed,
    ImageDiskFull,
    ImageNetworkFault,
    ImagePullFailed,
    ReferenceInvalid,
    fault_of,
)
from sandboxes.images.specs import MAX_DEFINITION_BYTES, ImageSpec, request_key
from sandboxes.images.templates import render, shipped_template, template_names
from sandboxes.runtime.exceptions import ImageUnusable, SandboxFault


def spec(**values: Any) -> ImageSpec:
    return ImageSpec(**{"name": "image", "source": "definition:", "definition": "x", **values})


def test_a_description_survives_the_way_to_another_process() -> None:
    given = spec(files={"a": "b"}, parameters={"c": [1, None]}, reuse="lock", lock="1")

    assert ImageSpec.from_dict(given.as_dict()) == given


@pytest.mark.parametrize(
    ("changes", "same"),
    [
        ({}, True),
        ({"name": "other"}, True),
        ({"lock": "2"}, True),
        ({"definition": "y"}, False),
        ({"files": {"a": "b"}}, False),
        ({"parameters": {"a": 1}}, False),
        ({"source": "template:"}, False),
    ],
)
def test_versioned_is_told_apart_by_what_is_built(changes: dict[str, Any], same: bool) -> None:
    assert (request_key(spec(**changes)) == request_key(spec())) is same


def test_scratch_and_lock_belong_to_a_name() -> None:
    for reuse in ("scratch", "lock"):
        assert request_key(spec(reuse=reuse)) != request_key(spec(reuse=reuse, name="other"))
    locked = spec(reuse="lock", lock="1")
    assert request_key(locked) == request_key(spec(reuse="lock", lock="1", definition="y"))
    assert request_key(locked) != request_key(spec(reuse="lock", lock="2"))


def test_a_changed_file_has_another_key(tmp_path: Path) -> None:
    path = tmp_path / "a.sif"
    path.write_text("one")
    before = request_key(spec(source=str(path)))
    assert request_key(spec(source=str(path), name="other")) == before

    os.utime(path, (1, 1))

    assert request_key(spec(source=str(path))) != before


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"definition": " \n"}, ImageBuildFailed),
        ({"definition": "é" * (MAX_DEFINITION_BYTES // 2 + 1)}, ImageBuildFailed),
        ({"source": "template:absent"}, ReferenceInvalid),
        ({"files": {"a": "x" * 1_100_000}}, ImageBuildFailed),
        ({"files": {f"f{n}": "" for n in range(201)}}, ImageBuildFailed),
        *(
            ({"files": {name: ""}}, ReferenceInvalid)
            for name in ("/etc/x", "../x", "a/../../x", "-x", "a b", "", ".image.def", "a\n")
        ),
        ({"files": {"a": 1}}, ReferenceInvalid),
    ],
)
def test_what_cannot_be_built_is_refused(changes: dict[str, Any], fault: type[Exception]) -> None:
    with pytest.raises(fault):
        spec(**changes).check()


def test_stages_are_read_with_comments_and_indented_look_alikes() -> None:
    text = (
        "# first\nBootstrap: docker\nFrom: 127.0.0.1:5000/a  # why\nStage: build\n"
        "%post\n    Bootstrap: yum\n    From: nowhere\n"
        "BootStrap: localimage\nfrom: /images/b.sif\n%post\n    true\n"
    )

    stages = read_stages(text)
    check_stages(stages)

    assert [(stage.bootstrap, stage.origin) for stage in stages] == [
        ("docker", "127.0.0.1:5000/a"),
        ("localimage", "/images/b.sif"),
    ]
    assert wants_plain_http(stages, ()) is True


def test_registries_with_and_without_tls_do_not_mix() -> None:
    mixed = "Bootstrap: docker\nFrom: localhost/a\n%post\n true\nBootstrap: docker\nFrom: debian\n"

    with pytest.raises(ImageBuildFailed, match="with and without TLS"):
        wants_plain_http(read_stages(mixed), ())
    assert wants_plain_http(read_stages("Bootstrap: scratch\n"), ()) is False


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("dial tcp 10.0.0.1:443: connect: connection refused", ImageNetworkFault),
        ("dial tcp: lookup registry.example.org: no such host", ImageNetworkFault),
        ("net/http: TLS handshake timeout", ImageNetworkFault),
        ("toomanyrequests: You have reached your pull rate limit", ImageNetworkFault),
        ("received unexpected HTTP status: 503 Service Unavailable", ImageNetworkFault),
        ("reading manifest 1 in docker.io/library/x: manifest unknown", ImagePullFailed),
        ("requested access to the resource is denied", ImagePullFailed),
        ("unauthorized: authentication required", ImagePullFailed),
        ("write /x/layer.tar: no space left on device", ImageDiskFull),
    ],
)
def test_what_the_engine_says_of_a_pull(said: str, kind: type[Exception]) -> None:
    fault = pull_fault(f"INFO: Starting build...\nFATAL:   While making image: {said}\n")

    assert type(fault) is kind
    assert said in str(fault)


def test_faults_are_found_by_their_codes() -> None:
    for kind in (ImageNetworkFault, ImagePullFailed, ImageUnusable):
        assert type(fault_of(kind.code, "x")) is kind
    assert type(fault_of("no.such.code", "x")) is SandboxFault


def test_a_digest_is_of_paths_kinds_modes_and_contents(tmp_path: Path) -> None:
    def tree(name: str) -> Path:
        folder = tmp_path / name
        (folder / "d").mkdir(parents=True)
        (folder / "d" / "f").write_text("content")
        (folder / "link").symlink_to("d/f")
        return folder

    one, other = tree("one"), tree("other")
    os.utime(other / "d" / "f", (1, 1))
    same = tree_digest(one)[0]
    assert tree_digest(other)[0] == same

    found = {same}
    (other / "d" / "f").write_text("Content")
    found.add(tree_digest(other)[0])
    (other / "d" / "f").write_text("content")
    assert tree_digest(other)[0] == same
    (other / "d" / "f").chmod(0o755)
    found.add(tree_digest(other)[0])
    (other / "d" / "f").chmod(0o644)
    (other / "link").unlink()
    (other / "link").symlink_to("d/g")
    found.add(tree_digest(other)[0])
    (other / "link").unlink()
    (other / "link").write_text("d/f")
    found.add(tree_digest(other)[0])

    assert len(found) == 5


def test_shipped_templates_are_rendered_with_quoted_parameters() -> None:
    assert template_names() == ["python", "repository"]

    text = render(
        shipped_template("python"),
        {
            "base": "debian:trixie",
            "apt_packages": ["git", "a; reboot"],
            "python_packages": ["numpy==2.4.6"],
            "requirements": "requirements.txt",
            "environment": {"MODE": "a $b"},
        },
    )

    assert text == (
        "Bootstrap: docker\nFrom: debian:trixie\n\n"
        "%files\n    requirements.txt /opt/requirements.txt\n\n"
        "%post\n    export DEBIAN_FRONTEND=noninteractive\n"
        "    apt-get update\n"
        "    apt-get install -y --no-install-recommends git 'a; reboot'\n"
        "    if ! python3 -m pip --version; then\n"
        "        apt-get update\n"
        "        apt-get install -y --no-install-recommends python3 python3-pip\n"
        "    fi\n"
        "    export PIP_BREAK_SYSTEM_PACKAGES=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore\n"
        "    python3 -m pip install -r /opt/requirements.txt\n"
        "    python3 -m pip install numpy==2.4.6\n"
        "    rm -rf /var/lib/apt/lists/*\n"
        "    mkdir -p /app\n\n"
        "%environment\n    export MODE='a $b'\n"
    )
    (stage,) = read_stages(text)
    assert (stage.bootstrap, stage.origin) == ("docker", "debian:trixie")


@pytest.mark.parametrize(
    "parameters",
    [
        {"base": "debian\n%post\n    id"},
        {"apt_packages": ["git\n%setup"]},
        {"environment": {"A": "x\ny"}},
    ],
)
def test_a_parameter_of_several_lines_opens_no_section(parameters: dict[str, Any]) -> None:
    with pytest.raises(ImageBuildFailed, match="one line"):
        render(shipped_template("python"), parameters)
