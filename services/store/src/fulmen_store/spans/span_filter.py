"""The filter of spans: all given conditions must hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

__all__ = ["AttributeValue", "SpanFacts", "SpanFilter"]

AttributeValue = str | bool | int | float


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanFacts:
    """The fields of a span that a filter compares; times are Unix times in nanoseconds.

    Attributes:
        attributes: Function that returns the single-valued attributes; called only if a filter needs them.
    """

    span_id: bytes
    name: str
    start_ns: int
    end_ns: int
    is_error: bool
    is_model_call: bool
    attributes: Callable[[], Mapping[str, AttributeValue]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanFilter:
    """Conditions; see `fulmen.store.v1.SpanFilter`."""

    names: frozenset[str] = frozenset()
    name_prefix: str = ""
    attributes: Mapping[str, str] = field(default_factory=dict)
    end_min_ns: int | None = None
    start_max_ns: int | None = None
    duration_min_ns: int | None = None
    errors_only: bool = False
    model_calls_only: bool = False
    span_ids: frozenset[bytes] = frozenset()

    def matches(self, span: SpanFacts) -> bool:
        """Returns whether a span meets every condition."""
        return (
            (not self.span_ids or span.span_id in self.span_ids)
            and (not self.names or span.name in self.names)
            and span.name.startswith(self.name_prefix)
            and self._is_in_time(span.start_ns, span.end_ns)
            and (self.duration_min_ns is None or span.end_ns - span.start_ns >= self.duration_min_ns)
            and (not self.errors_only or span.is_error)
            and (not self.model_calls_only or span.is_model_call)
            and (not self.attributes or self._has_attributes(span.attributes()))
        )

    def may_match_chunk(self, *, start_ns: int, end_ns: int) -> bool:
        """Returns whether a chunk with these times can contain a matching span; 0 means an unknown time."""
        return (self.end_min_ns is None or end_ns == 0 or end_ns >= self.end_min_ns) and (
            self.start_max_ns is None or start_ns == 0 or start_ns < self.start_max_ns
        )

    def _is_in_time(self, start_ns: int, end_ns: int) -> bool:
        return (self.end_min_ns is None or end_ns >= self.end_min_ns) and (
            self.start_max_ns is None or start_ns < self.start_max_ns
        )

    def _has_attributes(self, attributes: Mapping[str, AttributeValue]) -> bool:
        return all(key in attributes and _equals(attributes[key], text) for key, text in self.attributes.items())


def _equals(value: AttributeValue, text: str) -> bool:
    """Compares a value with the text of a filter: strings directly, other types in JSON form."""
    match value:
        case str():
            return value == text
        case bool():
            return text == ("true" if value else "false")
        case int():
            return text == str(value)
        case _:
            # JSON writes a number in more than one way: 1, 1.0 and 1e0.
            try:
                return float(text) == value
            except ValueError:
                return False
