"""Which format a caller gets: by the weights of its `Accept` (RFC 9110, section 12.5.1)."""

from collections.abc import Sequence
from typing import Any

from django.http.request import MediaType
from rest_framework.exceptions import NotAcceptable
from rest_framework.negotiation import DefaultContentNegotiation
from rest_framework.renderers import BaseRenderer
from rest_framework.request import Request


class WeightedNegotiation(DefaultContentNegotiation):
    """Choose the renderer that the caller weighs highest; the first it names among equals."""

    def select_renderer(
        self,
        request: Request,
        renderers: Sequence[BaseRenderer],  # type: ignore[override]
        format_suffix: str | None = None,
    ) -> Any:
        """Return the renderer and its media type. Raises NotAcceptable, which names all formats."""
        ranges = [MediaType(each) for each in _tokens(request.headers.get("Accept", "*/*"))]
        ranked = [
            (weight, -place, -order, renderer)
            for order, renderer in enumerate(renderers)
            for weight, place in [_weight(ranges, str(renderer.media_type))]
            if weight > 0
        ]
        if not ranked:
            offered = ", ".join(str(renderer.media_type) for renderer in renderers)
            raise NotAcceptable(f"None of the formats in `Accept` is offered here: {offered}.")
        chosen = max(ranked, key=lambda each: each[:3])[3]
        return chosen, chosen.media_type


def _tokens(header: str) -> list[str]:
    return [token for token in header.split(",") if token.strip()] or ["*/*"]


def _weight(ranges: Sequence[MediaType], media_type: str) -> tuple[float, int]:
    """Return the weight that the most specific matching range gives, and the range's place.

    Parameters other than `q` are ignored: `application/json; charset=utf-8` is JSON.
    """
    main, _, sub = media_type.partition("/")
    found = [
        (_specificity(each), each.quality, place)
        for place, each in enumerate(ranges)
        if each.main_type in ("*", main) and each.sub_type in ("*", sub)
    ]
    if not found:
        return 0.0, 0
    _, weight, place = max(found, key=lambda each: (each[0], each[1], -each[2]))
    return weight, place


def _specificity(each: MediaType) -> int:
    return (each.main_type != "*") + (each.sub_type != "*")


def wants_gzip(header: str) -> bool:
    """Tell whether a caller weighs gzip above no compression at all, by its `Accept-Encoding`.

    HTTP clients send `gzip, deflate` without being told; that alone is no wish: compressing costs
    more time than a fast network. `gzip, identity;q=0.5` is one.
    """
    weights = {
        str(each.main_type).lower(): each.quality for each in map(MediaType, _tokens(header))
    }
    gzip = weights.get("gzip", 0.0)
    return "identity" in weights and gzip > weights["identity"]
