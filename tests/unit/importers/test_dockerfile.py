"""What is read from a Dockerfile, built or not."""

from __future__ import annotations

import pytest

from rollouts.importers.base import TaskRejected
from rollouts.importers.definitions import convert_dockerfile
from rollouts.importers.dockerfile import last_workdir, read_instructions


@pytest.mark.parametrize(
    ("text", "workdir"),
    [
        ("", None),
        ("FROM debian\nWORKDIR /a\nWORKDIR /b\n", "/b"),
        ("FROM debian\n\n# RUN x\nrun \\\n  WORKDIR /no\n", None),
        ("COPY <<EOF /a\nWORKDIR /no\nEOF\nWORKDIR /yes\n", "/yes"),
        ("RUN <<-\tEOF\n\tWORKDIR /no\n\tEOF\nWORKDIR '/yes'\n", "/yes"),
        ("RUN <<-EOF\n\tWORKDIR /no\n\tEOF\nWORKDIR '/yes'\n", "/yes"),
        ("RUN cat <<< WORD\nWORKDIR /yes\n", "/yes"),
    ],
)
def test_the_last_workdir_counts(text: str, workdir: str | None) -> None:
    assert last_workdir(text) == workdir


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("ENV A=1 \\\n# comment\n B=2\nADD x y\nRUN z\n", [(1, "ENV"), (4, "ADD"), (5, "RUN")]),
        ("RUN true \\", [(1, "RUN")]),
        ("CMD bash\nENTRYPOINT x\nLABEL RUN=1\n", [(1, "CMD"), (2, "ENTRYPOINT"), (3, "LABEL")]),
        ("COPY <<A <<B /x/\none\nA\ntwo\nB\nrun y", [(1, "COPY"), (6, "RUN")]),
    ],
)
def test_instructions_and_their_lines(text: str, found: list[tuple[int, str]]) -> None:
    assert [(each.line, each.word) for each in read_instructions(text)] == found


def test_a_heredoc_keeps_its_lines_as_the_shell_reads_them() -> None:
    (run,) = read_instructions("RUN <<-'EOF' sh\n\t\techo # no comment\n\n\tEOF\n")
    assert (run.rest, [doc.text for doc in run.heredocs]) == (
        "<<-'EOF' sh",
        ["echo # no comment\n\n"],
    )


def test_empty_lines_and_comments_do_not_end_a_continued_instruction() -> None:
    text = "RUN one \\\n\n  # why\n\t\n  && two \\\n\n\nRUN three\n"
    found = [(each.line, each.word, each.rest) for each in read_instructions(text)]
    assert found == [(1, "RUN", "one   && two RUN three")]


@pytest.mark.parametrize("line", ["&& two", "RUN", "COPY  ", "/bin/true"])
def test_a_line_that_is_no_instruction_is_refused_by_number(line: str) -> None:
    with pytest.raises(TaskRejected, match=r"Dockerfile line 3: .* is no instruction"):
        convert_dockerfile(f"FROM debian\nRUN one\n{line}\n", {})
