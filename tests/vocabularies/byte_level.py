"""Write a byte-level BPE vocabulary as the `tokenizer.json` that `tokenizers` reads."""

from collections.abc import Mapping, Sequence
from typing import Any


def byte_letters() -> dict[int, str]:
    """Return the letter that stands for each byte (GPT-2's table)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {
        byte: chr(256 + place) for place, byte in enumerate(others)
    }


def merges_of(ranks: Mapping[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Return the merges that make a vocabulary of ranks, in order (as transformers does it)."""
    merges: list[tuple[bytes, bytes]] = []
    for token in sorted((token for token in ranks if len(token) > 1), key=ranks.__getitem__):
        splits = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = [pair for pair in splits if pair[0] in ranks and pair[1] in ranks]
        merges += sorted(known, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
    return merges


def from_ranks(
    ranks: Mapping[bytes, int], first_id: int, pattern: str, added: Sequence[tuple[int, str, bool]]
) -> dict[str, Any]:
    """Return the tokenizer of tiktoken's ranks, whose ids begin at `first_id`."""
    letters = byte_letters()

    def written(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    vocabulary = {written(token): first_id + rank for token, rank in ranks.items()}
    # The vocabulary of ids that come before the ranks' has to be whole, else others are given.
    vocabulary |= {text: number for number, text, _ in added if number < first_id}
    merges = [[written(left), written(right)] for left, right in merges_of(ranks)]
    return tokenizer_json(vocabulary, merges, pattern, added)


def tokenizer_json(
    vocabulary: Mapping[str, int],
    merges: Sequence[Sequence[str]],
    pattern: str,
    added: Sequence[tuple[int, str, bool]],
    normalizer: str | None = None,
) -> dict[str, Any]:
    """Return a tokenizer; `added` are (id, text, special)."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": number, "content": text, **flags, "special": special}
            for number, text, special in added
        ],
        "normalizer": normalizer and {"type": normalizer},
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{**split, "invert": False}, {**byte_level, "use_regex": False}],
        },
        "post_processor": None,
        "decoder": {**byte_level, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            # tiktoken takes a piece that is a token as it is.
            "ignore_merges": True,
            "vocab": dict(vocabulary),
            "merges": [list(pair) for pair in merges],
        },
    }
