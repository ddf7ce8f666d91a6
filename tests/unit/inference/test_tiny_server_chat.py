"""The model server's chat and its tokenizer, as clients of OpenAI's interface use them."""

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from examples.tiny_server.server import MODEL_NAME
from rollouts.inference.protocol import Server
from rollouts.inference.rendering import ConversationRenderer
from tests.unit.inference.test_tiny_server_http import PROMPT
from tests.unit.inference.test_tiny_server_streams import streamed

MESSAGES: list[Any] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Say hi"},
]
TEXT = "<|im_start|>user\nSay hi<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture
def client(tiny_server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=tiny_server.url, timeout=60) as client:
        yield client


@pytest.fixture
def chat(tiny_server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{tiny_server.url}/v1", api_key="none", max_retries=0, timeout=60
    ) as client:
        yield client


def test_openais_client_chats(chat: openai.OpenAI, renderer: ConversationRenderer) -> None:
    answer = chat.chat.completions.create(
        model=MODEL_NAME,
        messages=MESSAGES,
        max_completion_tokens=5,
        logprobs=True,
        top_logprobs=1,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )

    (choice,) = answer.choices
    assert (choice.finish_reason, choice.message.role) == ("length", "assistant")
    extra = choice.model_extra or {}
    assert choice.message.content == renderer.decode(extra["token_ids"])
    assert (answer.model_extra or {})["prompt_token_ids"] == list(renderer.render(MESSAGES))
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert len(choice.logprobs.content) == 5
    assert all(entry.top_logprobs[0].logprob >= entry.logprob for entry in choice.logprobs.content)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 5


def test_openais_client_streams(chat: openai.OpenAI) -> None:
    parts = list(
        chat.chat.completions.create(
            model=MODEL_NAME,
            messages=MESSAGES,
            max_tokens=5,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
    )
    assert parts[0].choices[0].delta.role == "assistant"
    assert parts[-2].choices[0].finish_reason == "length"
    assert parts[-1].usage is not None
    assert parts[-1].usage.completion_tokens == 5


def test_a_streamed_chat_tells_ids(client: httpx.Client) -> None:
    parts = streamed(
        client,
        "/v1/chat/completions",
        {"messages": MESSAGES, "max_tokens": 3, "return_token_ids": True, "ignore_eos": True},
    )
    assert [("prompt_token_ids" in part) for part in parts] == [True, *[False] * (len(parts) - 1)]
    assert sum(len(part["choices"][0].get("token_ids", [])) for part in parts) == 3


def test_openais_client_is_told_what_is_wrong(chat: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="at least one message") as caught:
        chat.chat.completions.create(model=MODEL_NAME, messages=[])
    assert caught.value.param == "messages"
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        chat.chat.completions.create(model="gpt-5", messages=MESSAGES)


@pytest.mark.parametrize(
    "messages",
    [
        "hi",
        ["hi"],
        [{"content": "hi"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "user", "content": [{"type": "text", "text": 1}]}],
        [{"role": "assistant", "content": "", "tool_calls": [{}]}],
    ],
)
def test_messages_that_the_template_has_no_place_for_are_refused(
    client: httpx.Client, messages: Any
) -> None:
    response = client.post("/v1/chat/completions", json={"messages": messages})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages"


def test_tools_are_refused(client: httpx.Client) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    body = {"messages": MESSAGES, "tools": [tool]}
    assert client.post("/v1/chat/completions", json=body).json()["error"]["param"] == "tools"


def test_parts_of_text_are_one_text(client: httpx.Client) -> None:
    parts = [{"type": "text", "text": "Say "}, {"type": "text", "text": "hi"}]
    whole, split = (
        client.post("/tokenize", json={"messages": [MESSAGES[0], {"role": "user", "content": c}]})
        for c in ("Say hi", parts)
    )
    assert whole.json()["tokens"] == split.json()["tokens"]


def test_texts_and_messages_become_tokens_and_back(
    client: httpx.Client, renderer: ConversationRenderer
) -> None:
    body = client.post("/tokenize", json={"prompt": TEXT, "return_token_strs": True}).json()
    assert (body["tokens"], body["count"], body["max_model_len"]) == (PROMPT, len(PROMPT), 8192)
    assert body["token_strs"][0] == "<|im_start|>"

    messages = client.post("/tokenize", json={"messages": MESSAGES}).json()
    assert messages["tokens"] == list(renderer.render(MESSAGES))
    closed = client.post(
        "/tokenize", json={"messages": MESSAGES, "add_generation_prompt": False}
    ).json()
    assert closed["tokens"] == messages["tokens"][: closed["count"]]
    assert closed["count"] < messages["count"]

    assert client.post("/detokenize", json={"tokens": PROMPT}).json() == {"prompt": TEXT}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": 5}),
        ("/detokenize", {"tokens": ["a"]}),
        ("/detokenize", {"tokens": [49152]}),
    ],
)
def test_what_is_no_text_and_no_tokens_is_refused(
    client: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    assert client.post(path, json=body).status_code == 400
