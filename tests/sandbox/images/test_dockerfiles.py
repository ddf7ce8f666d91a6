"""A Dockerfile and its context, built through Apptainer as what they became."""

from pathlib import Path

import pytest

from rollouts.importers.base import FileContent
from rollouts.importers.definitions import convert_dockerfile
from sandboxes.images.exceptions import ImageBuildFailed
from tests.sandbox.images.conftest import Images
from tests.sandbox.images.oci import folder_members, push_image

pytestmark = pytest.mark.sandbox

DOCKERFILE = r"""
ARG TAG=1
FROM {origin}:$TAG
ARG WHO=root
ENV GREETING="hello  world" LATER=no
WORKDIR /build/inner
RUN echo "$GREETING by $WHO in $PWD" > said && \
    # a comment between
    echo '%post' >> said && echo '{{{{ x }}}}' >> said
COPY app /opt/app
COPY data.bin run.sh ./
ADD "notes one.txt" /opt/
RUN <<EOF
cat /opt/app/deep/main.txt > both
/build/inner/run.sh >> both
EOF
COPY <<DONE /opt/here
from here
DONE
SHELL ["/bin/sh", "-e", "-c"]
RUN cat <<WORD > late
$LATER
WORD
CMD ["sh"]
"""
CONTEXT = {
    "app/deep/main.txt": FileContent(data=b"main\n"),
    "data.bin": FileContent(data=b"\x00\xff\r\n"),
    "run.sh": FileContent(data=b"#!/bin/sh\necho ran\n", mode=0o755),
    "notes one.txt": FileContent(data="%files\nß\n".encode()),
}


def test_a_dockerfile_is_built_as_docker_would(
    images: Images, registry: str, rootfs: Path, shared: Path
) -> None:
    push_image(registry, "tests/docker:1", [folder_members(rootfs)], shared)
    made = convert_dockerfile(DOCKERFILE.format(origin=f"{registry}/tests/docker"), CONTEXT)

    image = images.get("definition:", definition=made.build.definition, files=made.build.files)

    root = Path(image.folder)
    assert (root / "build/inner/said").read_text() == (
        "hello  world by root in /build/inner\n%post\n{{ x }}\n"
    )
    assert (root / "build/inner/both").read_text() == "main\nran\n"
    assert (root / "build/inner/late").read_text() == "no\n"
    assert (root / "build/inner/data.bin").read_bytes() == b"\x00\xff\r\n"
    assert (root / "opt/notes one.txt").read_text() == "%files\nß\n"
    assert (root / "opt/here").read_text() == "from here\n"
    assert (root / "opt/app/deep/main.txt").stat().st_mode & 0o777 == 0o644
    assert (root / "build/inner/run.sh").stat().st_mode & 0o777 == 0o755
    assert not (root / ".prorl-build").exists()
    assert (made.workdir, made.env["GREETING"]) == ("/build/inner", "hello  world")


def test_a_command_that_fails_fails_the_build(
    images: Images, registry: str, rootfs: Path, shared: Path
) -> None:
    push_image(registry, "tests/docker:2", [folder_members(rootfs)], shared)
    made = convert_dockerfile(f"FROM {registry}/tests/docker:2\nRUN exit 3\nRUN touch /after\n", {})

    with pytest.raises(ImageBuildFailed, match="exit status 3"):
        images.get("definition:", definition=made.build.definition, files=made.build.files)
