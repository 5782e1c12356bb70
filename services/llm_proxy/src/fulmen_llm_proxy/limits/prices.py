"""Prices of tokens, in US dollars per million tokens, which equals micro-dollars per token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final

from fulmen_llm_proxy.apis.usage import TokenCounts

MAX_KNOWN: Final = 10_000
"""Maximum number of models whose price is cached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """Prices of one model, in dollars per million tokens.

    Attributes:
        cached_input: prompt tokens read from the backend's cache.
        cache_write: prompt tokens written to the backend's cache.
    """

    input: float
    cached_input: float
    cache_write: float
    output: float

    def cost_micros(self, counts: TokenCounts) -> float:
        """Returns the cost of a call, micro-dollars."""
        prompt = counts.prompt or 0
        cached = min(counts.cached, prompt)
        written = min(counts.cache_written, prompt - cached)
        return (
            (prompt - cached - written) * self.input
            + cached * self.cached_input
            + written * self.cache_write
            + (counts.completion or 0) * self.output
        )


class PriceTable:
    """Prices by pattern."""

    def __init__(self, prices: Mapping[str, Price]) -> None:
        """Sets prices by pattern of a model's name, or of `{backend}/{model}`.

        `*` matches any characters, `?` a single one. A pattern without wildcards takes precedence, then the longest.
        Models are matched by the backend's name for them.
        """
        self._exact = {pattern: price for pattern, price in prices.items() if not _is_open(pattern)}
        open_patterns = [pattern for pattern in prices if _is_open(pattern)]
        self._open = [
            (pattern, prices[pattern]) for pattern in sorted(open_patterns, key=lambda each: (-len(each), each))
        ]
        self._known: dict[tuple[str, str], Price | None] = {}
        self.is_empty = not prices

    def of(self, backend_id: str, model: str) -> Price | None:
        """Returns the price of a model at a backend, or None."""
        key = (backend_id, model)
        try:
            return self._known[key]
        except KeyError:
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            price = self._known[key] = self._find(f"{backend_id}/{model}", model)
            return price

    def cost_micros(self, backend_id: str, model: str, counts: TokenCounts) -> float:
        """Returns the cost of a call, micro-dollars; 0 without a price."""
        if self.is_empty:
            return 0.0
        price = self.of(backend_id, model)
        return 0.0 if price is None else price.cost_micros(counts)

    def _find(self, full: str, model: str) -> Price | None:
        for name in (full, model):
            if name in self._exact:
                return self._exact[name]
        return next(
            (price for pattern, price in self._open if fnmatchcase(full, pattern) or fnmatchcase(model, pattern)), None
        )


def _is_open(pattern: str) -> bool:
    return "*" in pattern or "?" in pattern or "[" in pattern


NO_PRICES: Final = PriceTable({})
