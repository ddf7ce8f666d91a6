"""The forms in which models write tool calls: one function a form, chosen by name.

Each takes the marked text, where to begin, and the tools; it returns where the plain text ends
and the attempts. Where JSON is expected it is decoded up to its own end, so a closing mark inside
a string ends nothing even where the vocabulary does not have the mark as a token.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from rollouts.inference.parsing.attempts import (
    CUT,
    MALFORMED,
    MAX_ATTEMPTS,
    NO_NAME,
    Attempt,
    Tool,
    bad_json,
    from_object,
    too_many,
)
from rollouts.inference.parsing.fences import fenced_blocks
from rollouts.inference.parsing.marked import MarkedText
from rollouts.inference.parsing.xml_calls import ends_function, xml_call

Found = tuple[int, list[Attempt]]
Dialect = Callable[[MarkedText, int, "Sequence[Tool] | None"], Found]

_decoder = json.JSONDecoder()
_SPACE = re.compile(r"\s*")
# Python's own parser is recursive: what it says of long nonsense costs more than a call is worth.
LONGEST_PYTHON = 20_000


def hermes(marked: MarkedText, start: int, _tools: Sequence[Tool] | None) -> Found:
    """Read `<tool_call>{"name": …, "arguments": {…}}</tool_call>` (Hermes, Qwen 2.5 and 3)."""
    return _blocks(marked, start, "<tool_call>", _json_block)


def qwen3_coder(marked: MarkedText, start: int, tools: Sequence[Tool] | None) -> Found:
    """Read `<tool_call><function=…><parameter=…>…` (Qwen3-Coder, Qwen 3.5)."""

    def block(text: MarkedText, begin: int) -> tuple[Attempt, int]:
        # A value may hold any text: without a token for it, the last mark before the next call.
        following = text.find("<tool_call>", begin)
        limit = len(text.text) if following is None else following[0]
        close = text.find("</tool_call>", begin, limit)
        if close is None:
            return Attempt(complaint=CUT), limit
        later = text.find("</tool_call>", close[1], limit)
        while later is not None and not ends_function(text.text, begin, close[0]):
            close, later = later, text.find("</tool_call>", later[1], limit)
        return xml_call(text.text[begin : close[0]], tools), close[1]

    return _blocks(marked, start, "<tool_call>", block)


def llama3_json(marked: MarkedText, start: int, _tools: Sequence[Tool] | None) -> Found:
    """Read `{"name": …, "parameters": {…}}`, alone or after `<|python_tag|>` (Llama 3)."""
    tag = marked.find("<|python_tag|>", start)
    begin = _skip_space(marked.text, start if tag is None else tag[1])
    end = start if tag is None else tag[0]
    if tag is None and not re.match(r'\{\s*"(name|type|parameters)"', marked.text[begin:]):
        return len(marked.text), []
    text = marked.plain(begin)
    if not text.startswith("{"):
        return end, [_python_call(text)]
    attempts: list[Attempt] = []
    position = 0
    while position < len(text) and text[position] == "{":
        if len(attempts) == MAX_ATTEMPTS:
            return end, [*attempts, too_many()]
        try:
            value, position = _decoder.raw_decode(text, position)
        except (ValueError, RecursionError) as error:
            return end, [*attempts, _broken(error, text)]
        attempts.append(from_object(value, ("parameters", "arguments")))
        position = _skip_space(text, position)
        if text[position : position + 1] == ";":
            position = _skip_space(text, position + 1)
    if text[position:].strip():
        attempts.append(Attempt(complaint=MALFORMED))
    return end, attempts


def mistral(marked: MarkedText, start: int, _tools: Sequence[Tool] | None) -> Found:
    """Read `[TOOL_CALLS][{…}]`, or `[TOOL_CALLS]name[ARGS]{…}` of the later tokenizers."""
    first = found = marked.find("[TOOL_CALLS]", start)
    if first is None:
        return len(marked.text), []
    attempts: list[Attempt] = []
    while found is not None:
        if len(attempts) >= MAX_ATTEMPTS:
            attempts = [*attempts[:MAX_ATTEMPTS], too_many()]
            break
        following = marked.find("[TOOL_CALLS]", found[1])
        limit = len(marked.text) if following is None else following[0]
        attempts += _mistral_calls(marked, found[1], limit)
        found = following
    return first[0], attempts


def deepseek(marked: MarkedText, start: int, _tools: Sequence[Tool] | None) -> Found:
    """Read DeepSeek's call blocks: of V3 and R1 with a fence, of V3.1 without."""
    outer = marked.find("<｜tool▁calls▁begin｜>", start)
    found = _blocks(marked, start, "<｜tool▁call▁begin｜>", _deepseek_block)
    return (found[0] if outer is None else outer[0]), found[1]


def fenced_bash(marked: MarkedText, start: int, _tools: Sequence[Tool] | None) -> Found:
    """Read exactly one ```bash block as a call of `bash`; the text keeps it."""
    text = marked.plain(start)
    blocks = fenced_blocks(text, ("bash",))
    if len(blocks) == 1 and blocks[0].strip():
        return len(marked.text), [Attempt("bash", {"command": blocks[0].strip()})]
    if not blocks and "```bash" in text:
        return len(marked.text), [Attempt("bash", complaint=CUT)]
    if not blocks:
        return len(marked.text), []
    says = f"Write exactly one ```bash block with a command in it, not {len(blocks)}."
    return len(marked.text), [Attempt("bash", complaint=says)]


def no_calls(marked: MarkedText, _start: int, _tools: Sequence[Tool] | None) -> Found:
    """Read everything as text."""
    return len(marked.text), []


DIALECTS: dict[str, Dialect] = {
    "hermes": hermes,
    "qwen3_coder": qwen3_coder,
    "llama3_json": llama3_json,
    "mistral": mistral,
    "deepseek": deepseek,
    "fenced_bash": fenced_bash,
    "none": no_calls,
}

# What opens a call in each form, where the form has a mark of its own.
CALL_MARKS = {
    "hermes": "<tool_call>",
    "qwen3_coder": "<tool_call>",
    "llama3_json": "<|python_tag|>",
    "mistral": "[TOOL_CALLS]",
    "deepseek": "<｜tool▁calls▁begin｜>",
}


def detect(template: str) -> str:
    """Return the name of the form that a chat template teaches, `none` where it teaches none."""
    for mark, name in (
        ("<arg_key>", "none"),  # GLM's own form: the family reads it
        ("<function=", "qwen3_coder"),
        ("[TOOL_CALLS]", "mistral"),
        ("<｜tool▁call▁begin｜>", "deepseek"),
        ("<|python_tag|>", "llama3_json"),
        ('"parameters": dictionary of argument', "llama3_json"),
        ("<tool_call>", "hermes"),
    ):
        if mark in template:
            return name
    return "none"


def _blocks(
    marked: MarkedText,
    start: int,
    opening: str,
    read: Callable[[MarkedText, int], tuple[Attempt, int]],
) -> Found:
    first = found = marked.find(opening, start)
    attempts: list[Attempt] = []
    while found is not None:
        if len(attempts) == MAX_ATTEMPTS:
            attempts.append(too_many())
            break
        attempt, position = read(marked, found[1])
        attempts.append(attempt)
        found = marked.find(opening, position)
    return (len(marked.text) if first is None else first[0]), attempts


def _json_block(marked: MarkedText, begin: int) -> tuple[Attempt, int]:
    close = marked.find("</tool_call>", begin)
    try:
        value, end = _decoder.raw_decode(marked.text, _skip_space(marked.text, begin))
    except (ValueError, RecursionError) as error:
        if close is None:
            return Attempt(complaint=CUT), len(marked.text)
        return bad_json(ValueError(str(error))), close[1]
    close = marked.find("</tool_call>", end)
    if close is None:
        return Attempt(complaint=CUT), len(marked.text)
    if marked.text[end : close[0]].strip():
        return Attempt(complaint=MALFORMED), close[1]
    return from_object(value), close[1]


def _deepseek_block(marked: MarkedText, begin: int) -> tuple[Attempt, int]:
    close = marked.find("<｜tool▁call▁end｜>", begin)
    if close is None:
        return Attempt(complaint=CUT), len(marked.text)
    sep = marked.find("<｜tool▁sep｜>", begin, close[0])
    if sep is None:
        return Attempt(complaint=MALFORMED), close[1]
    head, body = marked.text[begin : sep[0]].strip(), marked.text[sep[1] : close[0]]
    fenced = _deepseek_fence(body)
    name, arguments = fenced or (head, body)
    if not name:
        return Attempt(complaint=NO_NAME), close[1]
    try:
        return Attempt(name, json.loads(arguments)), close[1]
    except (ValueError, RecursionError) as error:
        return bad_json(ValueError(str(error)), name), close[1]


def _deepseek_fence(body: str) -> tuple[str, str] | None:
    """Return name and arguments where the arguments stand in a fence, as V3 and R1 write them."""
    name, opened, rest = ("\n" + body.strip()).partition("\n```json\n")
    name = name.strip()
    if not opened or "\n" in name or not rest.endswith("```"):
        return None
    return name, rest.removesuffix("```")


def _mistral_calls(marked: MarkedText, begin: int, limit: int) -> list[Attempt]:
    args = marked.find("[ARGS]", begin, limit)
    if args is None:
        text = marked.plain(begin, limit).strip()
        try:
            value: Any = json.loads(text)
        except (ValueError, RecursionError) as error:
            return [_broken(error, text)]
        values = value if isinstance(value, list) else [value]
        return [from_object(entry) for entry in values] or [Attempt(complaint=MALFORMED)]
    call_id = marked.find("[CALL_ID]", begin, args[0])
    name = marked.plain(begin, args[0] if call_id is None else call_id[0]).strip()
    given = "" if call_id is None else marked.plain(call_id[1], args[0]).strip()
    body = marked.plain(args[1], limit).strip()
    if not name:
        return [Attempt(complaint=NO_NAME)]
    try:
        return [Attempt(name, json.loads(body), id=given)]
    except (ValueError, RecursionError) as error:
        broken = _broken(error, body)
        return [Attempt(name, complaint=broken.complaint, id=given)]


def _python_call(text: str) -> Attempt:
    """Read `name.call(key="value")`, Llama 3's form for its built-in tools."""
    if len(text) > LONGEST_PYTHON:
        return Attempt(complaint=MALFORMED)
    try:
        call = ast.parse(text.strip(), mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            return Attempt(complaint=MALFORMED)
        function = call.func
        if isinstance(function, ast.Attribute) and function.attr == "call":
            function = function.value
        if not isinstance(function, ast.Name):
            return Attempt(complaint=MALFORMED)
        pairs = {word.arg or "": ast.literal_eval(word.value) for word in call.keywords}
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return Attempt(complaint=MALFORMED)
    return Attempt(function.id, pairs)


def _broken(error: Exception, text: str) -> Attempt:
    """Tell JSON that was cut off from JSON that is wrong: the first breaks at its very end."""
    cut = isinstance(error, json.JSONDecodeError) and (
        error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated string")
    )
    return Attempt(complaint=CUT) if cut else bad_json(ValueError(str(error)))


def _skip_space(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    return position if match is None else match.end()
