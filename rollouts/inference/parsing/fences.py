"""Find fenced blocks line by line: a policy that loops writes thousands of them."""

from collections.abc import Collection

FENCE = "```"


def fenced_blocks(text: str, languages: Collection[str]) -> list[str]:
    """Return what stands in the closed blocks of these languages, line breaks included.

    A block begins with a line of three backticks and a language, and ends with the next line of
    three backticks alone. Takes time in proportion to the text.
    """
    blocks: list[str] = []
    inside: list[str] | None = None
    for line in text.split("\n"):
        mark = line.strip(" \t")
        if inside is None:
            if mark.startswith(FENCE) and mark.removeprefix(FENCE) in languages:
                inside = []
        elif mark == FENCE:
            blocks.append("".join(inside))
            inside = None
        else:
            inside.append(f"{line}\n")
    return blocks
