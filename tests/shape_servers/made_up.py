"""What shape servers say they sampled."""

import math
from collections.abc import Sequence

MODEL = "shape"
STOP = 7


def sampled(prompt: Sequence[int], limit: int, stops: Sequence[int]) -> tuple[list[int], str]:
    """Return up to 5 made-up ids, the last one a stop token where there is one and room."""
    ids = [(sum(prompt) + 13 * place) % 1000 for place in range(4)]
    if len(ids) < limit and stops:
        return [*ids, stops[0]], "stop"
    return ids[:limit], "length"


def logprob(token: int, temperature: float, *, raw: bool) -> float:
    """Return a made-up log-probability; the lower the temperature the higher, unless raw."""
    base = 0.5 + (token % 50) / 100
    return -base if raw else -base * math.sqrt(temperature)
