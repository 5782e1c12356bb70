"""The place of a call's span in its trace, decided before the call: the backend is told it.

Source: W3C Trace Context, section 3.2. No OpenTelemetry SDK: a call costs two random numbers.
"""

from __future__ import annotations

import hashlib
import random
import re

import msgspec

_TRACE_PARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_UUID = slice(len("rollouts/"), len("rollouts/") + 36)
_SAMPLED = "01"
_UNSET_TRACE = "0" * 32
_UNSET_SPAN = "0" * 16


class SpanPlace(msgspec.Struct, frozen=True, kw_only=True):
    """A span's own id, its trace and its parent, as hexadecimal text.

    Attributes:
        parent_id: of the caller's span; empty if the caller named none.
    """

    trace_id: str
    span_id: str
    parent_id: str
    flags: str

    @property
    def header(self) -> str:
        """The `traceparent` under which a backend puts what it does for this call."""
        return f"00-{self.trace_id}-{self.span_id}-{self.flags}"


def place_of(trace_parent: str, attempt: str) -> SpanPlace:
    """Returns the place of a new span: below the caller's, or in the trace that the rollout's id names.

    Args:
        trace_parent: the caller's `traceparent`; one that is malformed counts as none.
        attempt: `rollouts/{rollout}/attempts/{n}`.
    """
    span_id = f"{random.getrandbits(64) or 1:016x}"
    if trace_parent:
        match = _TRACE_PARENT.fullmatch(trace_parent)
        if match is not None and match[1] != _UNSET_TRACE and match[2] != _UNSET_SPAN:
            return SpanPlace(trace_id=match[1], span_id=span_id, parent_id=match[2], flags=match[3])
    return SpanPlace(trace_id=attempt[_UUID].replace("-", ""), span_id=span_id, parent_id="", flags=_SAMPLED)


def root_of(attempt: str) -> str:
    """Returns the span id that a runner gives to an attempt itself: the parent of calls that name none."""
    return hashlib.sha256(attempt.encode()).hexdigest()[:16]
