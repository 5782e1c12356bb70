"""A call while the pipeline runs it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fulmen_llm_proxy.apis.api import CallRequest
from fulmen_llm_proxy.backends.call_plan import Exchange
from fulmen_llm_proxy.calls.answer_cache import Recording
from fulmen_llm_proxy.calls.gate import Permit
from fulmen_llm_proxy.capture.decode import TokenCounts
from fulmen_llm_proxy.capture.finished_call import Caller, CallHead
from fulmen_llm_proxy.capture.span_place import SpanPlace
from fulmen_llm_proxy.routing.affinity import CallAffinity
from fulmen_llm_proxy.routing.table import Choice


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
