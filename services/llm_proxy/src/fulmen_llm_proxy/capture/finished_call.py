"""One model call: who made it, where it went, how it ended."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import msgspec

from fulmen_llm_proxy.apis.api import Api
from fulmen_llm_proxy.apis.collected import Collected, Fields
from fulmen_llm_proxy.capture.span_place import SpanPlace
from fulmen_llm_proxy.routing.table import Backend, Target

MAX_AGENT_NAME: Final = 100
"""Characters of an agent's name that are kept."""


class Attribution(msgspec.Struct, frozen=True, kw_only=True):
    """The attempt that a call belongs to, as its attempt key says.

    Attributes:
        attempt: `rollouts/{rollout}/attempts/{n}`.
        epoch: fencing epoch of the attempt's lease.
        mode: "train", "validation" or "test".
        expires_s: Unix time after which its key is no longer good.
        token_budget: how many tokens its calls may use; 0: what the project says.
    """

    attempt: str
    project: str
    epoch: int
    mode: str
    expires_s: float = math.inf
    token_budget: int = 0


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """Who makes a call.

    Attributes:
        attribution: the attempt that the call belongs to; None for everybody but an agent.
    """

    project: str
    attribution: Attribution | None


class CallHead(msgspec.Struct, frozen=True, kw_only=True):
    """What came with a call beside its body.

    Attributes:
        trace_parent: the W3C `traceparent` header, as it came; may be empty.
        agent_name: the agent or role that calls, as it says; may be empty.
        resend_count: how often the caller's client had sent the same request before, as it says.
        pass_on: headers that the backend should get.
    """

    trace_parent: str = ""
    agent_name: str = ""
    resend_count: int = 0
    pass_on: Mapping[str, str] = msgspec.field(default_factory=dict)


CALLER_GONE = "caller_gone"
"""The `error_type` of a call whose caller went away before it had its answer."""


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
