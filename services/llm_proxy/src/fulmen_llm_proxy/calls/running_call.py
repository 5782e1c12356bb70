"""The state of a call while the pipeline runs it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

from fulmen_llm_proxy.apis.api import CallRequest
from fulmen_llm_proxy.apis.usage import TokenCounts
from fulmen_llm_proxy.attempts.caller import Caller
from fulmen_llm_proxy.backends.call_plan import CallPlan
from fulmen_llm_proxy.calls.answer_cache import Recording
from fulmen_llm_proxy.calls.gate import Permit
from fulmen_llm_proxy.calls.responses.response_store import Continued
from fulmen_llm_proxy.capture.span_place import SpanPlace, new_span_id
from fulmen_llm_proxy.routing.balancing import CallAffinity
from fulmen_llm_proxy.routing.table import Choice

MAX_AGENT_NAME: Final = 100
"""Longest agent name that is kept, characters."""


class CallHead(msgspec.Struct, frozen=True, kw_only=True):
    """The metadata of a request.

    Attributes:
        request_id: id of the request, which its caller receives: the id of the call's span.
        trace_parent: the W3C `traceparent` header as received; may be empty.
        agent_name: name or role of the calling agent, as the caller states it; may be empty.
        resend_count: how many times the caller's client has sent this request before, as the client states it.
        pass_on: headers to forward to the backend.
        conversation: id of the conversation, as the caller states it; empty if it states none.
        timeout_s: how long the caller waits for its answer, as its client states it, seconds; None if it does not.
    """

    request_id: str = msgspec.field(default_factory=new_span_id)
    trace_parent: str = ""
    agent_name: str = ""
    resend_count: int = 0
    pass_on: Mapping[str, str] = msgspec.field(default_factory=dict)
    conversation: str = ""
    timeout_s: float | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class RunningCall:
    """A call in progress; counts as a failure of the proxy itself until its outcome is known.

    Attributes:
        place: position of its span in the trace; None for a call that is not recorded.
        headers: headers to forward to the backend.
        models: the models whose routes may serve it, its own first; empty until the fallbacks are needed.
        continued: the stored response that it continues, if the proxy keeps it; None otherwise.
        from_cache: whether the answer was not sampled for it: it came from the answer cache, or from a capture.
        replayed_span: id of the span of the call, in a lost attempt, that sampled its answer; empty if none did.
        recording: collects the answer for the cache; None if it is not to be cached.
        tries: how often it was sent to a backend.
        choice: the target of its latest try.
        plan: the plan of its latest try.
        answered: whether a backend answered with 200.
        answering: whether the caller has received the first byte.
        was_cut_off: whether the caller's connection broke before that, which no caller does.
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
    continued: Continued | None = None
    from_cache: bool = False
    replayed_span: str = ""
    recording: Recording | None = None
    tries: int = 0
    choice: Choice | None = None
    plan: CallPlan | None = None
    answered: bool = False
    status: int = 500
    error_type: str = "internal"
    first_byte_s: float | None = None
    answering: bool = False
    was_cut_off: bool = False
    counts: TokenCounts | None = None

    def patience_s(self) -> float | None:
        """Returns how much longer the caller waits, seconds; None if it does not specify it."""
        timeout_s = self.head.timeout_s
        return None if timeout_s is None else timeout_s - (time.perf_counter() - self.started)
