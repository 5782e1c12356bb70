"""`POST /v1/chat/completions`: the agent first, the capture after."""

from __future__ import annotations

import asyncio
import secrets
import time
from dataclasses import dataclass, field

from fulmen.errors import BackendUnavailable, Draining, FulmenError, Unavailable
from fulmen_llm_proxy.clients.backend import BackendAnswer, BackendClient, Dispatch
from fulmen_llm_proxy.domain.answer import AnswerFilter, Asked, Fields
from fulmen_llm_proxy.domain.backend_state import BackendStates
from fulmen_llm_proxy.domain.call import CALLER_GONE, Attribution, FinishedCall
from fulmen_llm_proxy.domain.capture_queue import CaptureQueue
from fulmen_llm_proxy.domain.ledger import AttemptLedger
from fulmen_llm_proxy.domain.request import ChatRequest, backend_body, parse_chat_request, routed_fields
from fulmen_llm_proxy.domain.routing import Choice
from fulmen_llm_proxy.domain.sse import EventSplitter
from fulmen_llm_proxy.domain.table import TableHolder
from fulmen_llm_proxy.metrics import Metrics
from fulmen_llm_proxy.transport.http.failures import (
    Refused,
    error_event,
    is_infrastructure,
    respond_error,
    status_of,
)
from fulmen_service_kit.http_wire import (
    CallerGone,
    DisconnectWatch,
    Header,
    Receive,
    Scope,
    Send,
    header,
    read_body,
    respond,
)

PATH = "/chat/completions"

_EVERYTHING = Asked(token_ids=True, logprobs=True, stream_usage=True)
_AGENT_HEADER = b"x-fulmen-agent"
# Set by the clients that vendors generate: their second try has 1, and so on.
_RESEND_HEADER = b"x-stainless-retry-count"
_KEY_REFUSED = (401, 403)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatLimits:
    """Bounds of the data plane.

    Attributes:
        max_in_flight: most calls at once in this process; more are refused with 429.
        max_event_bytes: largest single event of a stream.
    """

    max_request_bytes: int
    request_timeout_s: float
    max_in_flight: int
    max_event_bytes: int


@dataclass(slots=True, kw_only=True)
class _Call:
    """A call while it runs; counts as failed by the proxy itself until it is known to be otherwise."""

    request: ChatRequest
    attribution: Attribution | None
    affinity: bytes
    scope: Scope
    start_ns: int
    started: float
    size_bytes: int
    choice: Choice | None = None
    fields: Fields = field(default_factory=dict)
    captured: bool = False
    filter: AnswerFilter | None = None
    status: int = 500
    error_type: str = "internal"
    first_byte_s: float | None = None
    answering: bool = False


class ChatCompletions:
    """Answers chat completions and leaves what it saw to the capture queue."""

    def __init__(
        self,
        *,
        tables: TableHolder,
        client: BackendClient,
        states: BackendStates,
        ledger: AttemptLedger,
        queue: CaptureQueue,
        limits: ChatLimits,
        metrics: Metrics,
    ) -> None:
        self._tables = tables
        self._client = client
        self._states = states
        self._ledger = ledger
        self._queue = queue
        self._limits = limits
        self._metrics = metrics
        self._in_flight = 0

    async def __call__(self, attribution: Attribution | None, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request.

        Raises:
            FulmenError, Refused: if it is refused before it counts as a call; nothing was sent.
        """
        call = await self._admit(attribution, scope, receive)
        self._in_flight += 1
        self._metrics.in_flight.inc()
        if attribution is not None:
            self._ledger.begin(attribution.attempt)
        try:
            await self._answer(call, receive, send)
        except CallerGone:
            call.error_type = CALLER_GONE
            call.status = call.status if call.answering else 0
            self._metrics.caller_gone.inc()
        except (FulmenError, Refused) as error:
            call.status = status_of(error)
            call.error_type = error.code if isinstance(error, Refused) else error.reason.lower()
            await _report(call, error, send)
        except asyncio.CancelledError:
            call.status, call.error_type = status_of(Draining("")), "proxy_stopped"
            raise
        finally:
            self._in_flight -= 1
            self._finish(call)

    async def _admit(self, attribution: Attribution | None, scope: Scope, receive: Receive) -> _Call:
        """Decides whether the request becomes a call; refusals for want of room count against no agent."""
        try:
            async with asyncio.timeout(self._limits.request_timeout_s):
                request_body = await read_body(scope, receive, self._limits.max_request_bytes)
        except TimeoutError:
            raise Refused(408, "request_timeout", "The request's body did not arrive in time.") from None
        request = parse_chat_request(request_body)
        try:
            self._require_room(attribution)
        except (FulmenError, Refused):
            if attribution is not None:
                self._ledger.begin(attribution.attempt)
                self._ledger.end(attribution.attempt, recorded=False, infra_failure=True)
            raise
        affinity = secrets.token_bytes(16) if attribution is None else attribution.attempt.encode()
        return _Call(
            request=request,
            attribution=attribution,
            affinity=affinity,
            scope=scope,
            start_ns=time.time_ns(),
            started=time.perf_counter(),
            size_bytes=len(request_body),
        )

    def _require_room(self, attribution: Attribution | None) -> None:
        self._tables.require_loaded()
        if self._in_flight >= self._limits.max_in_flight:
            raise Refused(429, "too_many_calls", "The proxy has as many calls in flight as it may.")
        if attribution is not None and self._queue.is_full:
            raise Unavailable("The store is away and the proxy holds as many captures as it may.")

    def _plan(self, call: _Call) -> Dispatch:
        """Chooses where the next try goes, on the routing table of this moment."""
        choice = self._tables.current.choose(call.request.model, call.affinity, self._states.is_healthy)
        mode = "" if call.attribution is None else call.attribution.mode
        call.choice = choice
        call.fields = routed_fields(
            call.request, model=choice.target.model, overrides=choice.route.overrides.get(mode, {})
        )
        call.captured = call.attribution is not None and bool(choice.target.policy) and choice.backend.returns_token_ids
        body = backend_body(call.fields, stream=call.request.stream, capture=call.captured)
        trace_parent = header(call.scope, b"traceparent")
        return Dispatch(
            backend=choice.backend,
            path=PATH,
            body=body,
            stream=call.request.stream,
            headers={"traceparent": trace_parent.decode("latin-1")} if trace_parent else {},
        )

    async def _answer(self, call: _Call, receive: Receive, send: Send) -> None:
        async with DisconnectWatch(receive) as watch:
            answer = await self._client.send(lambda: self._plan(call))
            try:
                if answer.status in _KEY_REFUSED:
                    raise BackendUnavailable("The backend refused the proxy's own key.")
                call.status = answer.status
                if answer.status != 200:
                    call.error_type = f"backend_{answer.status}"
                    await self._pass_refusal(answer, send, watch)
                    return
                if call.request.stream and answer.content_type.startswith(b"text/event-stream"):
                    await self._pass_stream(call, answer, send, watch)
                else:
                    await self._pass_whole(call, answer, send, watch)
                call.error_type = ""
            finally:
                answer.close()

    async def _pass_refusal(self, answer: BackendAnswer, send: Send, watch: DisconnectWatch) -> None:
        extra: list[Header] = [(b"x-fulmen-error-source", b"backend")]
        if answer.retry_after:
            extra.append((b"retry-after", answer.retry_after.encode("latin-1")))
        watch.settle()
        await respond(send, answer.status, answer.body, answer.content_type, extra)

    async def _pass_whole(self, call: _Call, answer: BackendAnswer, send: Send, watch: DisconnectWatch) -> None:
        body = answer.body
        call.size_bytes += len(body)
        if call.attribution is not None:
            call.filter = AnswerFilter(call.request.asked if call.captured else _EVERYTHING)
            body = call.filter.answer(body)
        call.answering = True
        call.first_byte_s = time.perf_counter() - call.started
        watch.settle()
        await respond(send, 200, body, answer.content_type)

    async def _pass_stream(self, call: _Call, answer: BackendAnswer, send: Send, watch: DisconnectWatch) -> None:
        call.answering = True
        await send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [(b"content-type", answer.content_type), (b"cache-control", b"no-cache")],
            }
        )
        if call.attribution is None:
            await self._relay(call, answer, send)
        else:
            call.filter = AnswerFilter(call.request.asked if call.captured else _EVERYTHING)
            await self._filter_stream(call, call.filter, answer, send)
        watch.settle()
        await send({"type": "http.response.body", "body": b""})

    async def _relay(self, call: _Call, answer: BackendAnswer, send: Send) -> None:
        call.first_byte_s = time.perf_counter() - call.started
        await send({"type": "http.response.body", "body": answer.body, "more_body": True})
        async for chunk in answer.rest():
            await send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def _filter_stream(self, call: _Call, answer_filter: AnswerFilter, answer: BackendAnswer, send: Send) -> None:
        splitter = EventSplitter(self._limits.max_event_bytes)
        chunk: bytes = answer.body
        rest = answer.rest()
        while chunk:
            call.size_bytes += len(chunk)
            passed = b"".join([answer_filter.event(event) for event in splitter.feed(chunk)])
            if passed:
                if call.first_byte_s is None:
                    call.first_byte_s = time.perf_counter() - call.started
                await send({"type": "http.response.body", "body": passed, "more_body": True})
            chunk = await anext(rest, b"")
        if unfinished := splitter.rest():
            # A server that does not end its last event; whether it was whole, the capture judges.
            await send({"type": "http.response.body", "body": answer_filter.event(unfinished), "more_body": True})

    def _finish(self, call: _Call) -> None:
        elapsed_s = time.perf_counter() - call.started
        metrics = self._metrics
        metrics.in_flight.dec()
        metrics.calls.labels(str(call.status)).inc()
        metrics.call_seconds.observe(elapsed_s)
        if call.first_byte_s is not None:
            metrics.first_byte_seconds.observe(call.first_byte_s)
        attribution = call.attribution
        if attribution is None:
            return
        self._queue.put(
            FinishedCall(
                attribution=attribution,
                model=call.request.model,
                target=None if call.choice is None else call.choice.target,
                stream=call.request.stream,
                fields=call.fields,
                collected=None if call.filter is None else call.filter.collected,
                captured=call.captured,
                http_status=call.status,
                error_type=call.error_type,
                start_ns=call.start_ns,
                end_ns=call.start_ns + int(elapsed_s * 1e9),
                first_byte_s=call.first_byte_s,
                resend_count=_resend_count(call.scope),
                trace_parent=header(call.scope, b"traceparent").decode("latin-1"),
                agent_name=header(call.scope, _AGENT_HEADER).decode("latin-1")[:100],
                size_bytes=call.size_bytes,
            )
        )
        infra = is_infrastructure(call.status)
        self._ledger.end(attribution.attempt, recorded=True, infra_failure=infra)


def _resend_count(scope: Scope) -> int:
    said = header(scope, _RESEND_HEADER)
    return int(said) if said.isdigit() and len(said) < 4 else 0


async def _report(call: _Call, error: FulmenError | Refused, send: Send) -> None:
    """Tells the caller what failed: as an answer, or within the stream that has begun."""
    if not call.answering or isinstance(error, Refused):
        await respond_error(send, error)
        return
    await send({"type": "http.response.body", "body": error_event(error), "more_body": True})
    await send({"type": "http.response.body", "body": b""})
