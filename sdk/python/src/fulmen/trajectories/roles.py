"""The agent and step of a call: from its own attributes, or from the nearest ancestor that has them.

Invariants: the result depends on the spans only, not on their order; cycles of parents, which only a broken emitter
produces, end the search; nothing is inferred from times; what an agent's spans cost is bounded by their number.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final, TypeVar

from opentelemetry.proto.trace.v1.trace_pb2 import Span

from fulmen.model_call import ModelCall
from fulmen.spans import attributes

_T = TypeVar("_T", str, int)

RESPONSE_ID_ATTRIBUTE: Final = "gen_ai.response.id"
"""Span attribute: id of a model call's answer (OpenTelemetry conventions for generative AI)."""

MAX_ANCESTORS: Final = 1000
"""Ancestors of a span that are searched; only a broken or hostile program nests its spans deeper."""
MAX_CLIENTS: Final = 64
"""Spans that may name one answer; of more, none is taken for the client's."""

_AGENT_NAME, _STEP = attributes.AGENT_NAME.encode(), attributes.STEP.encode()
_RESPONSE_ID = RESPONSE_ID_ATTRIBUTE.encode()


class SpanTree:
    """The spans of one attempt: their parents, agents and steps."""

    def __init__(self) -> None:
        """Initializes an empty tree."""
        self._parents: dict[bytes, bytes] = {}
        self._names: dict[bytes, str] = {}
        self._steps: dict[bytes, int] = {}
        self._answered: dict[str, list[bytes]] = {}

    @classmethod
    def of_calls(cls, calls: Iterable[ModelCall]) -> SpanTree:
        """Returns the tree of calls without other spans."""
        tree = cls()
        tree._parents = {call.span_id: call.parent_span_id for call in calls}
        return tree

    def __contains__(self, span_id: object) -> bool:
        """Returns whether the attempt has this span."""
        return span_id in self._parents

    def add(self, span: Span, packed: bytes, *, is_call: bool) -> None:
        """Adds a span.

        Args:
            span: The span.
            packed: Its serialised form; searching it is many times faster than iterating over the attributes.
            is_call: Whether it is the proxy's span of a model call.
        """
        span_id = span.span_id
        self._parents[span_id] = span.parent_span_id
        if _AGENT_NAME not in packed and _STEP not in packed and (is_call or _RESPONSE_ID not in packed):
            return
        for attribute in span.attributes:
            value = attribute.value
            if attribute.key == RESPONSE_ID_ATTRIBUTE and not is_call and value.string_value:
                self._answered.setdefault(value.string_value, []).append(span_id)
            if attribute.key == attributes.AGENT_NAME and value.string_value:
                self._names[span_id] = value.string_value
            if attribute.key == attributes.STEP and value.WhichOneof("value") == "int_value" and value.int_value >= 0:
                self._steps[span_id] = value.int_value

    def put_below_client(self, call: Span) -> None:
        """Moves a call below the agent's own span of the same answer, unless the agent's client has set the parent.

        Such a span has the answer's id (`gen_ai.response.id`). Of several, the innermost is used, and of those the one
        with the smallest id. Call this after all spans have been added.
        """
        if not self._answered:
            return
        answer = next((a.value.string_value for a in call.attributes if a.key == RESPONSE_ID_ATTRIBUTE), "")
        named = self._answered.get(answer, ())
        if not 0 < len(named) <= MAX_CLIENTS:
            return
        above = set(self.upward(call.span_id))
        clients = [each for each in named if call.span_id not in self.upward(each)]
        if clients and above.isdisjoint(clients):
            self._parents[call.span_id] = min(clients, key=lambda each: (-len(list(self.upward(each))), each))

    def upward(self, span_id: bytes) -> Iterator[bytes]:
        """Yields the ids of a span and its ancestors, nearest first; the last one may be of an unknown span."""
        seen: set[bytes] = set()
        while span_id and span_id not in seen and len(seen) <= MAX_ANCESTORS:
            yield span_id
            seen.add(span_id)
            span_id = self._parents.get(span_id, b"")

    def agent_name(self, span_id: bytes) -> str:
        """Returns the agent named by the span or its nearest ancestor; empty if none is."""
        return self._nearest(self._names, span_id) or ""

    def step(self, span_id: bytes) -> int | None:
        """Returns the step named by the span or its nearest ancestor; None if none is."""
        return self._nearest(self._steps, span_id)

    def _nearest(self, said: Mapping[bytes, _T], span_id: bytes) -> _T | None:
        if not said:
            return None
        return next((said[each] for each in self.upward(span_id) if each in said), None)
