"""Dockerfiles as definitions: what becomes of each instruction, and what is refused by line."""

from __future__ import annotations

import pytest

from rollouts.importers.base import FileContent, TaskRejected
from rollouts.importers.definitions import FOLDER, Converted, convert_dockerfile

CONTEXT = {
    "app/main.py": FileContent(data=b"print(1)\n"),
    "app/run.sh": FileContent(data=b"#!/bin/sh\n", mode=0o755),
    "data.bin": FileContent(data=b"\x00\xff"),
    "notes one.txt": FileContent(data=b"%files\n{{ no }}\n"),
    "src.tar.gz": FileContent(data=b"x"),
}


def convert(text: str) -> Converted:
    return convert_dockerfile(text, CONTEXT)


def post(text: str) -> list[str]:
    """Return the lines of the script that a Dockerfile's instructions become."""
    return convert(f"FROM debian:12\n{text}\n").build.files["build/post.sh"].splitlines()


def script(text: str) -> str:
    """Return what a RUN runs."""
    files = convert(f"FROM debian:12\n{text}\n").build.files
    return files[f"build/{post(text)[-1].rsplit('/', 2)[1]}/{post(text)[-1].rsplit('/', 1)[1]}"]


def test_the_definition_runs_one_script_whatever_the_commands_hold() -> None:
    made = convert("FROM debian:12\nRUN echo '\\\n%post' {{ x }}\n")
    assert made.build.definition == (
        f"Bootstrap: docker\nFrom: debian:12\n\n%files\n    build {FOLDER}\n\n"
        f"%post\n    /bin/sh -e {FOLDER}/post.sh\n    rm -rf {FOLDER}\n"
    )
    assert made.build.name == convert("FROM debian:12\nRUN echo '\\\n%post' {{ x }}\n").build.name
    assert made.build.name != convert("FROM debian:12\nRUN true\n").build.name


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("RUN true", [f"cd / && /bin/sh {FOLDER}/f/0000"]),
        (
            'WORKDIR /a\nWORKDIR b\nSHELL ["/bin/bash", "-o", "pipefail", "-c"]\nRUN true',
            [
                "mkdir -p /a",
                "mkdir -p /a/b",
                f"cd /a/b && /bin/bash -o pipefail {FOLDER}/f/0000",
            ],
        ),
        (
            "ENV A=1 B='x y'\nENV C the rest",
            ["export A=1", "export B='x y'", "export C='the rest'"],
        ),
        ("ARG V=2\nENV A=v$V-${V:-0}-${W:-none}", ["export V=2", "export A=v2-2-none"]),
        ("ENV PATH=/opt/bin:$PATH\nENV P=${PATH:+set}", None),
        (
            "COPY app/main.py /srv/",
            ["mkdir -p /srv", f"cp {FOLDER}/f/0000 /srv/main.py && chmod 644 /srv/main.py"],
        ),
        (
            "COPY app /srv",
            [
                "mkdir -p /srv",
                f"cp {FOLDER}/f/0000 /srv/main.py && chmod 644 /srv/main.py",
                "mkdir -p /srv",
                f"cp {FOLDER}/f/0001 /srv/run.sh && chmod 755 /srv/run.sh",
            ],
        ),
        (
            "WORKDIR /w\nADD --chmod=600 data.bin x",
            [
                "mkdir -p /w",
                "mkdir -p /w",
                f"base64 -d {FOLDER}/f/0000 > /w/x && chmod 600 /w/x",
            ],
        ),
        (
            'COPY --chown=root:root ["notes one.txt", "/n/"]',
            [
                "mkdir -p /n",
                f"cp {FOLDER}/f/0000 '/n/notes one.txt' && chmod 644 '/n/notes one.txt'",
            ],
        ),
        (
            "COPY *.bin /b/",
            ["mkdir -p /b", f"base64 -d {FOLDER}/f/0000 > /b/data.bin && chmod 644 /b/data.bin"],
        ),
        (
            "COPY <<EOF /etc/x\nhello\nEOF",
            ["mkdir -p /etc", f"cp {FOLDER}/f/0000 /etc/x && chmod 644 /etc/x"],
        ),
        (
            "RUN <<EOF\n#!/usr/bin/env python3\nprint(1)\nEOF",
            [f"cd / && /usr/bin/env python3 {FOLDER}/f/0000"],
        ),
        (
            "USER root\nCMD x\nEXPOSE 80\nRUN --mount=type=cache,target=/c true",
            [f"cd / && /bin/sh {FOLDER}/f/0000"],
        ),
    ],
)
def test_instructions_become_lines_in_their_order(text: str, lines: list[str] | None) -> None:
    wanted = lines or [
        "export PATH=/opt/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "export P=set",
    ]
    assert post(text) == wanted


@pytest.mark.parametrize(
    ("text", "run"),
    [
        ("RUN a && \\\n  # why\n  b", "a &&   b\n"),
        ('RUN ["sh", "-c", "a b"]', "sh -c 'a b'\n"),
        ("RUN cat <<EOF > /x\n$one\nEOF", "cat <<EOF > /x\n$one\nEOF\n"),
        ("RUN <<EOF\na\nb\nEOF", "a\nb\n\n"),
    ],
)
def test_commands_are_what_the_shell_is_given(text: str, run: str) -> None:
    assert script(text) == run


def test_what_a_task_is_told_beside_the_image() -> None:
    made = convert("ARG TAG=12\nFROM debian:$TAG\nENV A=1\nWORKDIR /w\nENTRYPOINT x\nCMD y\n")
    assert "From: debian:12\n" in made.build.definition
    assert (made.workdir, dict(made.env)) == ("/w", {"A": "1"})
    assert made.ignored == ("line 5: ENTRYPOINT", "line 6: CMD")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "has no FROM"),
        ("RUN true\nFROM debian", "line 1: RUN stands before FROM"),
        ("FROM debian AS a\nFROM debian\n", "line 2: FROM begins a second stage"),
        ("FROM scratch\n", "starts from nothing"),
        ("FROM ../x\n", "names no image"),
        ("FROM --platform=linux/arm64 debian\n", "only linux/amd64 is built"),
        ("FROM debian\nUSER bob\n", "line 2: USER is bob; only root"),
        ("FROM debian\nCOPY --from=a /x /y\n", "has --from=a"),
        ("FROM debian\nCOPY --chown=bob app /y\n", "has --chown=bob"),
        ("FROM debian\nCOPY ../x /y\n", "from outside environment/"),
        ("FROM debian\nCOPY gone /y\n", "copies gone, which is not in environment/"),
        ("FROM debian\nCOPY app\n", "needs what to copy and where to"),
        ("FROM debian\nCOPY 'app /y\n", "cannot be read: No closing quotation"),
        ("FROM debian\nADD https://example.org/x /y\n", "fetches https://example.org/x"),
        ("FROM debian\nADD src.tar.gz /y\n", "unpacks src.tar.gz; use COPY"),
        ("FROM debian\nRUN --mount=type=secret,id=x true\n", "has --mount=type=secret"),
        ("FROM debian\nONBUILD RUN true\n", "ONBUILD is not supported"),
        ("FROM debian\nSHELL bash\n", 'a list that ends with "-c"'),
        ("FROM debian\nENV A=1 B\n", "has 'B'; write name=value"),
        ("FROM debian\nENV A-B=1\n", "has 'A-B', which is no name"),
        ("# escape=`\nFROM debian\n", "another escape character"),
    ],
)
def test_what_a_definition_cannot_say_is_refused(text: str, reason: str) -> None:
    with pytest.raises(TaskRejected) as refused:
        convert(text)
    assert reason in str(refused.value)


def test_files_that_are_too_large_to_travel_are_refused() -> None:
    with pytest.raises(TaskRejected, match="put large files into an image of their own"):
        convert_dockerfile("FROM debian\nCOPY big /\n", {"big": FileContent(data=b"x" * 2_000_000)})
    with pytest.raises(TaskRejected, match="dockerignore is not read"):
        convert_dockerfile("FROM debian\n", {".dockerignore": FileContent(data=b"x")})
