"""Conversations that tasks bring along: what one can go on from, and what is wrong with others."""

from __future__ import annotations

from typing import Any

import pytest

from rollouts.handlers import conversation
from rollouts.handlers.conversation import InvalidConversation, check_conversation
from tests.unit.handlers.episode_parts import assistant, user

SYSTEM = {"role": "system", "content": "Be brief."}


def call(name: str = "bash", *, id: str = "c0", arguments: Any = '{"command": "ls"}') -> Any:
    """Return a call as OpenAI writes it."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def calling(*calls: Any, **values: Any) -> dict[str, Any]:
    """Return a turn with calls."""
    return {"role": "assistant", "content": "", "tool_calls": list(calls), **values}


def answer(id: str = "c0", **values: Any) -> dict[str, Any]:
    """Return the result of a call."""
    return {"role": "tool", "tool_call_id": id, "name": "bash", "content": "a.py", **values}


@pytest.mark.parametrize(
    "messages",
    [
        [user("a")],
        [SYSTEM, user("a"), assistant("b"), user("")],
        [user("a"), {**assistant(""), "reasoning_content": "Hm."}, user("b")],
        [user("a"), calling(call()), answer()],
        [user("a"), calling(call(id="x"), call(id="y")), answer("y"), answer("x")],
        [user("a"), calling(call()), answer(), calling(call()), answer(), user("b")],
        [user("a"), calling(call(arguments="{}")), answer(), assistant("b"), user("c")],
    ],
)
def test_what_a_policy_can_go_on_from_is_kept_as_it_is(messages: list[Any]) -> None:
    checked = check_conversation(messages)
    assert checked == messages
    assert all(own is not given for own, given in zip(checked, messages, strict=True))


def test_absent_contents_of_calls_and_names_of_results_are_filled_in() -> None:
    unnamed = {"role": "tool", "tool_call_id": "c0", "content": "a.py"}
    first, turn, result = check_conversation([user("a"), calling(call(), content=None), unnamed])
    assert (first, turn, result) == (user("a"), calling(call()), answer())


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "messages must be a list with at least one message"),
        ("text", "messages must be a list"),
        ({"role": "user"}, "messages must be a list"),
        (["text"], "message 0 has no role of system, user, assistant, tool"),
        ([{"role": ["user"], "content": "a"}], "message 0 has no role"),
        ([{"role": "critic", "content": "a"}], "message 0 has no role"),
        ([{**user("a"), "name": "x"}], "message 0: a message of role user has no 'name'"),
        ([{"role": "user"}], "message 0: content must be a text"),
        ([{**user("a"), "content": [{"type": "text"}]}], "message 0: content must be a text"),
        ([user("a\0")], "message 0: content holds a NUL character"),
        ([user("\ud800")], "messages hold half of a surrogate pair"),
        ([SYSTEM], "the last message is the system's; end with user or tool"),
        ([SYSTEM, SYSTEM, user("a")], "message 1: the role is system; here stands user"),
        ([user("a"), SYSTEM], "message 1: the role is system; here stands assistant"),
        ([assistant("a"), user("b")], "message 0: the role is assistant; here stands system or"),
        ([user("a"), user("b")], "message 1: the role is user; here stands assistant"),
        ([user("a"), assistant("b")], "the last message is the assistant's"),
        ([user("a"), assistant("b"), assistant("c")], "message 2: .* here stands user"),
        ([user("a"), {"role": "assistant", "content": None}], "message 1: content must be a text"),
        ([user("a"), {**assistant(""), "reasoning_content": 1}], "reasoning_content must be a"),
        ([user("a"), answer()], "message 1: the role is tool; here stands assistant"),
        ([user("a"), calling()], "message 1: tool_calls must be a list with at least one call"),
        ([user("a"), {**assistant(""), "tool_calls": {}}], "message 1: tool_calls must be a list"),
        ([user("a"), calling("ls")], "message 1, call 0: it must be {'id', 'type'"),
        ([user("a"), calling({**call(), "type": "tool"})], "message 1, call 0: it must be"),
        ([user("a"), calling({**call(), "index": 0})], "message 1, call 0: it must be"),
        ([user("a"), calling(call(id=""))], "message 1, call 0: id must not be empty"),
        ([user("a"), calling(call(""))], "message 1, call 0: name must not be empty"),
        ([user("a"), calling(call(arguments={}))], "message 1, call 0: arguments must be a text"),
        ([user("a"), calling(call(arguments="{"))], "arguments must be the JSON text of an object"),
        ([user("a"), calling(call(arguments="[]"))], "arguments must be the JSON text of an"),
        ([user("a"), calling(call(arguments="[" * 99_999))], "arguments must be the JSON text"),
        ([user("a"), calling(call(), call()), answer()], "message 1: two of its calls have the"),
        ([user("a"), calling(call())], "the call 'c0' has no result at the end"),
        ([user("a"), calling(call()), user("b")], "message 2: the role is user; here stands tool"),
        ([user("a"), calling(call()), answer("c1")], "message 2: tool_call_id names no call"),
        ([user("a"), calling(call()), answer(), answer()], "message 3: the role is tool"),
        (
            [user("a"), calling(call(id="x"), call(id="y")), answer("x"), answer("x")],
            "message 3: tool_call_id names no call that waits for a result",
        ),
    ],
)
def test_what_nobody_can_go_on_from_is_told_by_place(messages: Any, reason: str) -> None:
    with pytest.raises(InvalidConversation, match=reason):
        check_conversation(messages)


def test_number_and_size_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    size = len('[{"role": "user", "content": "é"}]'.encode())
    monkeypatch.setattr(conversation, "MAX_BYTES", size)
    monkeypatch.setattr(conversation, "MAX_MESSAGES", 3)

    assert check_conversation([user("é")]) == [user("é")]
    with pytest.raises(InvalidConversation, match=f"{size + 1} bytes as JSON; at most {size} fit"):
        check_conversation([user("éa")])
    with pytest.raises(InvalidConversation, match="4 messages; at most 3 may be given"):
        check_conversation([user("a"), assistant("")] * 2)
