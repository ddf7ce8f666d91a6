"""What is read from a Dockerfile that is not built."""

from __future__ import annotations

import pytest

from rollouts.importers.dockerfile import DockerfileFacts, read_dockerfile


@pytest.mark.parametrize(
    ("text", "workdir", "line", "word"),
    [
        ("", None, None, None),
        ("FROM debian\nWORKDIR /a\nWORKDIR /b\n", "/b", None, None),
        ("FROM debian\n\n# RUN x\nrun \\\n  WORKDIR /no\n", None, 4, "RUN"),
        ("COPY <<EOF /a\nWORKDIR /no\nEOF\nWORKDIR /yes\n", "/yes", 1, "COPY"),
        ("ENV A=1 \\\n# comment\n B=2\nADD x y\nRUN z\n", None, 4, "ADD"),
        ("RUN true \\", None, 1, "RUN"),
        ("CMD bash\nENTRYPOINT x\nLABEL RUN=1\n", None, None, None),
    ],
)
def test_facts(text: str, workdir: str | None, line: int | None, word: str | None) -> None:
    assert read_dockerfile(text) == DockerfileFacts(
        workdir=workdir, building_line=line, building_instruction=word
    )
