"""Read the ids of one sampled turn as thoughts, text and tool calls."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rollouts.inference.exceptions import RenderingFault
from rollouts.inference.parsed import ParsedTurn
from rollouts.inference.parsing.attempts import Tool, as_calls
from rollouts.inference.parsing.dialects import CALL_MARKS, DIALECTS
from rollouts.inference.parsing.marked import MarkedText
from rollouts.inference.tokenizer_folder import TokenizerFolder

THOUGHTS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))


class TurnParser:
    """Read turns of one model; never raises for what a policy wrote. Thread-safe.

    `opens_thought` says that the generation prompt itself opens a thought.
    """

    def __init__(self, folder: TokenizerFolder, dialect: str, *, opens_thought: bool) -> None:
        if dialect not in DIALECTS:
            known = ", ".join(sorted(DIALECTS))
            raise RenderingFault(f"{folder.path}: no tool parser {dialect!r}; there are {known}")
        self._folder = folder
        self._read = DIALECTS[dialect]
        self._call_mark = CALL_MARKS.get(dialect)
        self._opens_thought = opens_thought

    def parse(
        self, ids: Sequence[int], stops: Collection[int], tools: Sequence[Tool] | None
    ) -> ParsedTurn:
        """Return what a turn says; a call that cannot be run carries a complaint."""
        whole = list(ids)
        while whole and whole[-1] in stops:
            whole.pop()
        marked = MarkedText(self._folder, whole)
        reasoning, start = self._thoughts(marked)
        end, attempts = self._read(marked, start, tools)
        content = marked.plain(start, max(start, end))
        if reasoning is not None or attempts:
            content = content.strip()
        return ParsedTurn(content, reasoning, as_calls(attempts, whole, tools))

    def _thoughts(self, marked: MarkedText) -> tuple[str | None, int]:
        """Return the thoughts, None without any, and where the rest begins."""
        for opening, closing in THOUGHTS:
            opened = marked.find(opening)
            leads = opened is not None and not marked.text[: opened[0]].strip()
            if not leads and not self._opens_thought:
                continue
            begin = opened[1] if leads and opened is not None else 0
            closed = marked.find(closing, begin)
            if closed is not None:
                return marked.plain(begin, closed[0]).strip() or None, closed[1]
            if leads:
                return self._unclosed(marked, begin)
        return self._unclosed(marked, 0) if self._opens_thought else (None, 0)

    def _unclosed(self, marked: MarkedText, begin: int) -> tuple[str | None, int]:
        """Read a thought that never closes: a call's token ends it, else it is all there is.

        So do the renderers of the package `renderers`, SGLang and vLLM: policies forget the end
        of a thought more often than they put a call's own token into one.
        """
        called = self._call_mark and marked.find_token(self._call_mark, begin)
        end = called[0] if called else len(marked.text)
        return marked.plain(begin, end).strip() or None, end
