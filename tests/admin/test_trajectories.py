"""The trajectory page: readable, counted, and inert whatever the agent wrote."""

import pytest

from rollouts.admin.conversation import MAX_CHARACTERS, MAX_TURNS, plain, read_turns
from rollouts.models import Trajectory
from rollouts.storage import trajectory_storage
from tests.admin.factories import make_trajectory

pytestmark = pytest.mark.django_db

HOSTILE = "</pre><script>fetch('//evil')</script>{{ 7|add:7 }}{% include 'x' %}"


def test_the_page_shows_the_conversation_and_the_tokens(operator) -> None:
    trajectory = make_trajectory(
        [
            {"role": "system", "content": "Answer with one line."},
            {"role": "user", "content": "Count the lines."},
            {"role": "assistant", "content": "wc -l < /app/journal.txt"},
        ]
    )

    page = operator.get(Trajectory, "change", trajectory.pk).content.decode()

    texts = ["Answer with one line.", "Count the lines.", "wc -l &lt; /app/journal.txt"]
    assert [page.index(text) for text in texts] == sorted(page.index(text) for text in texts)
    assert "<tr><td>0</td><td>2</td><td>3</td><td>2</td></tr>" in page


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": HOSTILE},
        {"role": HOSTILE, "content": "x"},
        {"role": "assistant", "content": [{"type": "text", "text": HOSTILE}]},
        {"role": "assistant", "content": {"html": HOSTILE}},
        {"role": "assistant", "content": None, "tool_calls": [{"name": HOSTILE}]},
        HOSTILE,
    ],
)
def test_hostile_content_is_inert(operator, message) -> None:
    trajectory = make_trajectory([message])

    page = operator.get(Trajectory, "change", trajectory.pk).content.decode()

    assert "<script>fetch" not in page
    assert "</pre><script" not in page
    assert "&lt;/pre&gt;&lt;script&gt;" in page


def test_calls_are_readable_and_messages_without_text_are_shown_whole() -> None:
    call = {"id": "c1", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}
    flat = {"name": "bash", "arguments": {"command": "é"}}

    turns = read_turns(
        [
            {"role": "assistant", "content": "Look.", "tool_calls": [call, flat, {"odd": 1}]},
            {"role": "assistant", "content": None},
            {"role": "tool", "output": "x"},
        ]
    )

    assert [turn.text for turn in turns] == [
        'Look.\n[calls] bash {"command": "ls"}\n[calls] bash {"command": "é"}\n[calls] {"odd": 1}',
        "",
        '{"role": "tool", "output": "x"}',
    ]


def test_characters_that_act_are_written_out() -> None:
    assert plain("a\x1b[31mb\u202ec\x00d\u200be\n\tf") == "a\\x1b[31mb\\u202ec\\x00d\\u200be\n\tf"
    assert plain("one\u2028two\r\n") == "one\\u2028two\\r\n"
    assert plain("é 日本 🙂 ≤ a\u00a0b") == "é 日本 🙂 ≤ a\u00a0b"


def test_long_texts_and_long_conversations_are_cut_and_said_so() -> None:
    turns = read_turns([{"role": "user", "content": "x" * (MAX_CHARACTERS + 5)}] * (MAX_TURNS + 2))

    assert len(turns) == MAX_TURNS + 1
    assert turns[0].text == "x" * MAX_CHARACTERS + "\n[5 more characters]"
    assert turns[-1].text == "2 more messages; read them over the API."
    assert read_turns(None) == []


def test_a_missing_or_damaged_file_is_said_and_the_page_opens(operator) -> None:
    missing, damaged = make_trajectory(), make_trajectory()
    trajectory_storage().delete(missing.path)
    Trajectory.objects.filter(pk=damaged.pk).update(sha256="0" * 64)

    first = operator.get(Trajectory, "change", missing.pk)
    second = operator.get(Trajectory, "change", damaged.pk)

    assert f"file {missing.path} is missing from the store." in first.content.decode()
    assert f"file {damaged.path} is damaged." in second.content.decode()


def test_a_file_too_large_for_a_page_is_not_read(operator) -> None:
    trajectory = make_trajectory()
    Trajectory.objects.filter(pk=trajectory.pk).update(size_bytes=10**9)
    trajectory_storage().delete(trajectory.path)

    page = operator.get(Trajectory, "change", trajectory.pk).content.decode()

    assert "1000000000 bytes are too many for a page; read it over the API." in page
