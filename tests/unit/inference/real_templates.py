"""Real chat templates on the vocabularies of their families, loaded once a vocabulary."""

import copy
import json
import re
import tempfile
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

from examples.tiny_server.tokenizer import cached_tokenizer
from rollouts.inference.template_renderer import TemplateRenderer
from rollouts.inference.tokenizer_folder import TokenizerFolder
from tests.unit.inference.conftest import CACHE, real_vocabulary

TEMPLATES = Path(__file__).parent / "templates"
NAMES = sorted(path.stem for path in TEMPLATES.glob("*.jinja"))
CONTROL = re.compile(
    r"<[|｜][\w▁]+[|｜]>|\[gMASK\]|<sop>|<(?:start|end)_of_turn>|\[(?:ARGS|CALL_ID)\]"
    r"|</?(?:tool_call|tool_response|think|arg_key|arg_value)>"
)
PLAIN = re.compile(r"</?(?:tool_call|tool_response|think|arg_key|arg_value)>")
# Begin of sequence and end of turn by family, as the models' own configurations name them.
NAMED = {
    "qwen": ("<|endoftext|>", "<|im_end|>"),
    "llama3": ("<|begin_of_text|>", "<|eot_id|>"),
    "deepseek": ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
    "mistral": ("<s>", "</s>"),
    "gemma": ("<bos>", "<end_of_turn>"),
    "phi3": ("<s>", "<|end|>"),
    "cohere": ("<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>"),
    "lfm2": ("<|startoftext|>", "<|im_end|>"),
    "gptoss": ("<|startoftext|>", "<|return|>"),
    "glm4moe": ("[gMASK]", "<|endoftext|>"),
    "nemotron": ("<s>", "<|im_end|>"),
}
# The others stand on SmolLM2's vocabulary: the ids differ, no more.
VOCABULARIES = {
    "qwen3_5": "qwen3.5",
    "qwen3_8": "qwen3.5",
    "qwen": "qwen3",
    "llama3": "llama3",
    "deepseek_r1_distill": "llama3",
    "deepseekv3": "deepseek",
    "mistral": "mistral",
}


def family_of(name: str, table: dict[str, Any]) -> Any:
    """Return what a table says of the first family that a template's name begins with."""
    return next((value for prefix, value in table.items() if name.startswith(prefix)), None)


def template_folder(name: str) -> TokenizerFolder:
    """Return the folder of a template; it shares its tokenizers with others of its vocabulary."""
    folder = copy.copy(_vocabulary_folder(family_of(name, VOCABULARIES)))
    bos, eos = family_of(name, NAMED)
    source = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    folder.config = {"chat_template": source}
    folder.named_tokens = {"bos_token": bos, "eos_token": eos}
    folder._template = None
    return folder


def template_renderer(name: str, *, keeps_thoughts: bool = True) -> TemplateRenderer:
    """Return the renderer of a template."""
    return TemplateRenderer(template_folder(name), keeps_thoughts=keeps_thoughts)


@lru_cache
def reference_tokenizer(vocabulary: str | None) -> Any:
    """Return transformers' tokenizer of a vocabulary."""
    transformers: Any = import_module("transformers")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=_vocabulary_folder(vocabulary).full
    )


def reference_ids(
    name: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None
) -> list[int]:
    """Return the prompt's ids by transformers: it renders the text, then encodes all of it."""
    folder = template_folder(name)
    tokenizer = reference_tokenizer(family_of(name, VOCABULARIES))
    tokenizer.bos_token, tokenizer.eos_token = folder.named_tokens.values()
    if name.startswith("deepseek"):  # these join a call's arguments to text
        messages = [_with_written_arguments(message) for message in messages]
    text = tokenizer.apply_chat_template(
        messages,
        tools=tools,
        chat_template=folder.config["chat_template"],
        add_generation_prompt=True,
        tokenize=False,
    )
    return list(tokenizer.encode(text, add_special_tokens=False))


@lru_cache
def _vocabulary_folder(vocabulary: str | None) -> TokenizerFolder:
    """Write a vocabulary with the marks of all its templates, where it lacks them."""
    smollm2 = cached_tokenizer(CACHE) / "tokenizer.json"
    path = smollm2 if vocabulary is None else real_vocabulary(vocabulary)
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    marks: dict[str, None] = {}
    for name in NAMES:
        if family_of(name, VOCABULARIES) == vocabulary:
            text = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
            marks |= dict.fromkeys([*family_of(name, NAMED), *CONTROL.findall(text)])
    added = tokenizer["added_tokens"]
    known = {token["content"] for token in added}
    used = [*tokenizer["model"]["vocab"].values(), *(token["id"] for token in added)]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    for mark in marks:
        if mark not in known:
            number = max(used) + 1
            used = [number]
            added.append(
                {"id": number, "content": mark, **flags, "special": not PLAIN.fullmatch(mark)}
            )
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
        (Path(place) / "tokenizer_config.json").write_text("{}", encoding="utf-8")
        return TokenizerFolder(Path(place))


def _with_written_arguments(message: dict[str, Any]) -> dict[str, Any]:
    calls = [
        {**call, "function": {**function, "arguments": json.dumps(function["arguments"])}}
        for call in message.get("tool_calls", [])
        for function in [call["function"]]
    ]
    return {**message, "tool_calls": calls} if calls else message
