"""One model call: who made it, where it went, how it ended."""

from __future__ import annotations

import msgspec

from fulmen_llm_proxy.apis.api import Api
from fulmen_llm_proxy.apis.collected import Collected, Fields
from fulmen_llm_proxy.attempts.caller import Attribution
from fulmen_llm_proxy.capture.span_place import SpanPlace
from fulmen_llm_proxy.routing.table import Backend, Target


class FinishedCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call that is over, as its handler leaves it for the capture.

    Attributes:
        api: the API that the backend was called by.
        fields: the request's fields as the backend got them, without what the capture added.
        collected: what the answer brought; None when no answer came.
        captured: token ids were asked of the backend.
        http_status: what the agent was answered with; 0 when it went away before.
        error_type: what ended the call early; empty when it ended well.
        start_ns: wall clock at its begin, nanoseconds since 1970.
        end_ns: wall clock at its end.
        first_byte_s: seconds from its begin to the first byte for the agent; None without one.
        resend_count: how often the caller's client had sent the same request before, as it says.
        place: where its span is in the trace.
        size_bytes: memory that the call holds while it waits, about.
    """

    attribution: Attribution
    api: Api
    model: str
    target: Target | None
    backend: Backend | None
    stream: bool
    fields: Fields
    collected: Collected | None
    captured: bool
    http_status: int
    error_type: str
    start_ns: int
    end_ns: int
    first_byte_s: float | None
    resend_count: int
    place: SpanPlace
    agent_name: str
    size_bytes: int
