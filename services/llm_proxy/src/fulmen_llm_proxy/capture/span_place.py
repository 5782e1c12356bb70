"""The position of a call's span in its trace, chosen before the call and sent to the backend.

The span's id is the id of the request, which its caller is told.

Source: W3C Trace Context, section 3.2. No OpenTelemetry SDK: a call costs two random numbers.
"""

from __future__ import annotations

import random
import re

import msgspec

from fulmen.ids import trace_id_of

_TRACE_PARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_SAMPLED = "01"
_UNSET_TRACE = "0" * 32
_UNSET_SPAN = "0" * 16


class SpanPlace(msgspec.Struct, frozen=True, kw_only=True):
    """A span's own id, its trace and its parent, as hexadecimal text.

    Attributes:
        parent_id: id of the caller's span; empty if the caller sent none.
    """

    trace_id: str
    span_id: str
    parent_id: str
    flags: str

    @property
    def header(self) -> str:
        """The `traceparent` for the backend's own spans of this call."""
        return f"00-{self.trace_id}-{self.span_id}-{self.flags}"


def new_span_id() -> str:
    """Returns the id of a new span: 16 hexadecimal digits, never all 0."""
    return f"{random.getrandbits(64) or 1:016x}"


def place_of(trace_parent: str, attempt: str, *, span_id: str = "") -> SpanPlace:
    """Returns the position of a span: below the caller's, or in the trace of the rollout.

    Args:
        trace_parent: the caller's `traceparent`; ignored if malformed.
        attempt: `projects/{project}/rollouts/{rollout}/attempts/{n}`.
        span_id: its id; empty for a new one.
    """
    span_id = span_id or new_span_id()
    named = _named(trace_parent)
    if named is not None:
        return SpanPlace(trace_id=named[1], span_id=span_id, parent_id=named[2], flags=named[3])
    return SpanPlace(trace_id=trace_id_of(attempt), span_id=span_id, parent_id="", flags=_SAMPLED)


def trace_of(trace_parent: str) -> str:
    """Returns the trace id of a `traceparent`; empty if it is missing or malformed."""
    named = _named(trace_parent)
    return "" if named is None else named[1]


def _named(trace_parent: str) -> re.Match[str] | None:
    match = _TRACE_PARENT.fullmatch(trace_parent) if trace_parent else None
    return None if match is None or match[1] == _UNSET_TRACE or match[2] == _UNSET_SPAN else match
