"""A finished model call, as it is passed to the capture."""

from __future__ import annotations

import msgspec

from fulmen_llm_proxy.apis.api import Api
from fulmen_llm_proxy.apis.collected import Collected, Fields
from fulmen_llm_proxy.attempts.caller import Attribution
from fulmen_llm_proxy.capture.span_place import SpanPlace
from fulmen_llm_proxy.routing.table import Backend, Target


class FinishedCall(msgspec.Struct, frozen=True, kw_only=True):
    """A finished call.

    Attributes:
        api: API of the request to the backend.
        fields: fields of the backend's request, without those added for the capture.
        collected: slices of the answer; None without an answer.
        captured: whether token ids were requested.
        http_status: status of the answer to the agent; 0 if it had disconnected.
        error_type: type of the error; empty on success.
        start_ns: start time, nanoseconds since 1970.
        end_ns: end time, nanoseconds since 1970.
        first_byte_s: time from the start to the first byte for the agent, seconds; None without one.
        resend_count: how many times the caller's client had sent this request before, as the client states it.
        place: position of its span in the trace.
        size_bytes: approximate memory of the call while it waits.
        replayed_span: id of the span of the call, in a lost attempt, that sampled its answer; empty if it was sampled for it.
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
    replayed_span: str = ""
