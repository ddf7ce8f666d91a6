"""Write SmolLM2's tokenizer, found in its GGUF file, as a Hugging Face tokenizer folder."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from examples.tiny_server.weights import gguf_path

# gguf's token_type of control tokens (llama.cpp, LLAMA_TOKEN_TYPE_CONTROL).
CONTROL = 3
# Raise when what the files hold changes.
FOLDER_LAYOUT = 1


def export_tokenizer(folder: str | Path) -> Path:
    """Write `tokenizer.json` and `tokenizer_config.json` (template included) to `folder`.

    Idempotent; each file appears whole or not at all.
    """
    import gguf

    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    fields = gguf.GGUFReader(gguf_path()).fields
    tokens = _value(fields, "tokens")
    kinds = _value(fields, "token_type")
    control = [number for number, kind in enumerate(kinds) if kind == CONTROL]
    _write(target / "tokenizer.json", _tokenizer(tokens, _value(fields, "merges"), control))
    _write(target / "tokenizer_config.json", _tokenizer_config(fields, tokens, control))
    return target


def cached_tokenizer(cache_dir: Path) -> Path:
    """Return the tokenizer folder of a cache, written first where it is not there (5 s)."""
    folder = cache_dir / f"tokenizer-{FOLDER_LAYOUT}"
    if not (folder / "tokenizer_config.json").is_file():
        export_tokenizer(folder)
    return folder


def _value(fields: Any, key: str) -> Any:
    return fields[f"tokenizer.ggml.{key}"].contents()


def _added_token(token: str, number: int | None = None) -> dict[str, Any]:
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    identity = {} if number is None else {"id": number}
    return {**identity, "content": token, **plain, "special": True}


def _tokenizer(tokens: list[str], merges: list[str], control: list[int]) -> dict[str, Any]:
    """Return the fast tokenizer: llama.cpp's pre-tokenizer `smollm` is digits, then byte level."""
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added_token(tokens[number], number) for number in control],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
        },
        "post_processor": None,
        "decoder": {**byte_level, "add_prefix_space": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in merges],
        },
    }


def _tokenizer_config(fields: Any, tokens: list[str], control: list[int]) -> dict[str, Any]:
    def named(key: str) -> str:
        return str(tokens[_value(fields, f"{key}_token_id")])

    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "added_tokens_decoder": {str(number): _added_token(tokens[number]) for number in control},
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "bos_token": named("bos"),
        "eos_token": named("eos"),
        "pad_token": named("padding"),
        "unk_token": named("unknown"),
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields["llama.context_length"].contents(),
        "chat_template": fields["tokenizer.chat_template"].contents(),
    }


def _write(path: Path, body: dict[str, Any]) -> None:
    handle, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        json.dump(body, file, ensure_ascii=False)
    Path(name).chmod(0o644)
    Path(name).replace(path)
