"""A call while the pipeline runs it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

from fulmen_llm_proxy.apis.api import CallRequest
from fulmen_llm_proxy.apis.usage import TokenCounts
from fulmen_llm_proxy.attempts.caller import Caller
from fulmen_llm_proxy.backends.call_plan import Exchange
from fulmen_llm_proxy.calls.answer_cache import Recording
from fulmen_llm_proxy.calls.gate import Permit
from fulmen_llm_proxy.capture.span_place import SpanPlace
from fulmen_llm_proxy.routing.balancing import CallAffinity
from fulmen_llm_proxy.routing.table import Choice

MAX_AGENT_NAME: Final = 100
"""Longest agent name that is kept, characters."""


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


@dataclass(slots=True, kw_only=True, eq=False)
class RunningCall:
    """A call while it runs; counts as failed by the proxy itself until it is known to be otherwise.

    Attributes:
        place: where its span is in the trace; None for a call that is not recorded.
        headers: what the backend gets of the caller's headers.
        models: the routes that it may take, its own first; empty until that is asked.
        remembered: its answer came from memory.
        recording: takes its answer, to be remembered.
        choice: where its last try went.
        answered: a backend answered it with 200.
        answering: the caller has the first byte.
    """

    request: CallRequest
    caller: Caller
    head: CallHead
    permit: Permit
    affinity: CallAffinity
    start_ns: int
    started: float
    size_bytes: int
    place: SpanPlace | None
    headers: Mapping[str, str]
    models: tuple[str, ...] = ()
    remembered: bool = False
    recording: Recording | None = None
    choice: Choice | None = None
    exchange: Exchange | None = None
    answered: bool = False
    status: int = 500
    error_type: str = "internal"
    first_byte_s: float | None = None
    answering: bool = False
    counts: TokenCounts | None = None
