"""Runs a call: the agent first, the capture after."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

from fulmen.errors import BackendUnavailable, Draining, FulmenError, ModelLimitExceeded
from fulmen_llm_proxy.apis.api import Api, ApiName, joined
from fulmen_llm_proxy.apis.collected import PolicyChange
from fulmen_llm_proxy.apis.errors import CALLER_GONE, error_document, error_event
from fulmen_llm_proxy.apis.sse import EventSplitter
from fulmen_llm_proxy.apis.usage import token_counts
from fulmen_llm_proxy.attempts.caller import Caller
from fulmen_llm_proxy.attempts.guard import AttemptGuard, AttemptTie
from fulmen_llm_proxy.backends.call_plan import Exchange, plan_exchange
from fulmen_llm_proxy.backends.client import BackendAnswer, Dispatch
from fulmen_llm_proxy.calls.answer_memory import AnswerMemory
from fulmen_llm_proxy.calls.failures import (
    SOURCE_HEADER,
    Refused,
    call_error,
    code_of,
    headers_of,
    is_infrastructure,
    is_throttled,
    status_of,
)
from fulmen_llm_proxy.calls.gate import Gate
from fulmen_llm_proxy.calls.response_ids import ResponseKeeper
from fulmen_llm_proxy.calls.running_call import CallHead, RunningCall
from fulmen_llm_proxy.calls.sender import FIRST, CallSender
from fulmen_llm_proxy.calls.sink import Header, Sink, Watch
from fulmen_llm_proxy.capture.finished_call import FinishedCall
from fulmen_llm_proxy.capture.ledger import AttemptLedger
from fulmen_llm_proxy.capture.queue import CaptureQueue
from fulmen_llm_proxy.capture.span_place import place_of
from fulmen_llm_proxy.metrics.service import Metrics
from fulmen_llm_proxy.routing.backend_state import BackendStates
from fulmen_llm_proxy.routing.balancing import CallAffinity
from fulmen_llm_proxy.routing.retry import Step
from fulmen_llm_proxy.routing.table import Choice, RoutingTable
from fulmen_llm_proxy.routing.table_holder import TableHolder
from fulmen_service_kit.http_wire import JSON_TYPE, CallerGone

_KEY_REFUSED = (401, 403)
_EVENT_STREAM = b"text/event-stream"
_TRAIN = "train"


class CallPipeline:
    """Answers calls and leaves what it saw to the capture queue."""

    def __init__(
        self,
        *,
        tables: TableHolder,
        sender: CallSender,
        memory: AnswerMemory,
        keeper: ResponseKeeper,
        states: BackendStates,
        ledger: AttemptLedger,
        queue: CaptureQueue,
        gate: Gate,
        guard: AttemptGuard,
        metrics: Metrics,
        max_event_bytes: int,
        traced: Callable[[FinishedCall], None] | None = None,
    ) -> None:
        """Takes what calls go through.

        Args:
            traced: told of every call of an attempt that is over.
            max_event_bytes: largest single event of a stream.
        """
        self._tables = tables
        self._sender = sender
        self._memory = memory
        self._keeper = keeper
        self._states = states
        self._ledger = ledger
        self._queue = queue
        self._gate = gate
        self._guard = guard
        self._metrics = metrics
        self._traced = traced
        metrics.calls.read_routes(tables)
        self._max_event_bytes = max_event_bytes
        self._running: set[RunningCall] = set()
        tables.follow(self._note_versions)

    async def run(self, api: Api, caller: Caller, head: CallHead, body: bytes, sink: Sink) -> None:
        """Answers one request.

        Raises:
            FulmenError, Refused: if it is refused before it counts as a call; nothing was sent.
        """
        try:
            call = self._begin(api, caller, head, body)
        except (FulmenError, Refused) as error:
            self._metrics.calls.failed(code_of(error), status_of(error))
            raise
        self._running.add(call)
        attribution = caller.attribution
        self._metrics.calls.in_flight += 1
        if attribution is not None:
            self._ledger.begin(attribution.attempt)
        try:
            if attribution is None:
                await self._answer(call, sink)
            else:
                with AttemptTie(self._guard, attribution):
                    await self._answer(call, sink)
        except CallerGone:
            call.error_type = CALLER_GONE
            call.status = call.status if call.answering else 0
        except (FulmenError, Refused) as error:
            call.status, call.error_type = status_of(error), code_of(error)
            await _report(call, error, sink)
        except asyncio.CancelledError:
            call.status, call.error_type = status_of(Draining("")), "proxy_stopped"
            raise
        finally:
            self._finish(call)

    def note_refused(self, caller: Caller, error: FulmenError | Refused) -> None:
        """Counts a request that is refused before it is a call; for want of room, that is no fault of the agent's."""
        self._metrics.calls.failed(code_of(error), status_of(error))
        self._note_no_room(caller, error)

    def _note_no_room(self, caller: Caller, error: FulmenError | Refused) -> None:
        attribution = caller.attribution
        status = status_of(error)
        if attribution is not None and is_infrastructure(status):
            self._ledger.begin(attribution.attempt)
            self._ledger.end(attribution.attempt, recorded=False, infra_failure=True, throttled=is_throttled(status))

    def _begin(self, api: Api, caller: Caller, head: CallHead, body: bytes) -> RunningCall:
        """Decides whether the request becomes a call; a refusal for want of room is no fault of the agent's."""
        request = api.parse(body)
        attribution = caller.attribution
        try:
            permit = self._gate.admit(caller, request)
        except (FulmenError, Refused) as error:
            self._note_no_room(caller, error)
            raise
        place = None if attribution is None else place_of(head.trace_parent, attribution.attempt)
        return RunningCall(
            request=request,
            caller=caller,
            head=head,
            permit=permit,
            affinity=CallAffinity(None if attribution is None else attribution.attempt, request.fields),
            start_ns=time.time_ns(),
            started=time.perf_counter(),
            size_bytes=len(body),
            place=place,
            # A call that is not recorded has no span: what the backend does then belongs to the caller's.
            headers=head.pass_on if place is None else {**head.pass_on, "traceparent": place.header},
        )

    def _note_versions(self, table: RoutingTable) -> None:
        """Notes in the calls that run which of them now get tokens of another policy version."""
        for call in self._running:
            if call.choice is not None and call.exchange is not None and call.exchange.captured:
                _note_version(call.choice, call.exchange, table)

    def _plan(self, call: RunningCall, step: Step) -> Dispatch:
        """Chooses where the next try goes, on the routing table of this moment."""
        request, kept = call.request, None
        by_responses = request.api.name is ApiName.RESPONSES
        if by_responses:
            request, kept = self._keeper.continued(request, call.caller.project)
        if kept is None:
            choice = self._choose(call, step)
        else:
            choice = self._keeper.choice(self._tables.current, request.model, kept)
            call.permit.enter(choice.backend)
        attribution = call.caller.attribution
        mode = "" if attribution is None else attribution.mode
        exchange = plan_exchange(
            request,
            choice,
            overrides=choice.route.overrides.get(mode, {}),
            attributed=attribution is not None,
        )
        if by_responses:
            exchange = self._keeper.sealed(exchange, choice.backend.id, call.caller.project)
        call.choice, call.exchange = choice, exchange
        return Dispatch(choice=choice, exchange=exchange, headers=call.headers)

    def _choose(self, call: RunningCall, step: Step) -> Choice:
        """Chooses a target; replicas whose limits are used up are passed over while there is another."""
        model = call.models[step.route] if step.route else call.request.model
        avoid = step.avoid
        while True:
            choice = self._tables.current.choose(model, call.affinity, self._states, avoid)
            try:
                call.permit.enter(choice.backend)
            except ModelLimitExceeded:
                if choice.backend.id in avoid or len(choice.variant.replicas) == 1:
                    raise
                avoid |= {choice.backend.id}
            else:
                return choice

    def _routes(self, call: RunningCall, choice: Choice | None) -> int:
        """Says how many routes a call may take; an attempt's training call gets its tokens from its own policy."""
        route = self._tables.current.routes.get(call.request.model)
        if route is None:
            return 1
        attribution = call.caller.attribution
        if attribution is not None and attribution.mode == _TRAIN:
            trained = any(target.policy for target in (route.targets if choice is None else [choice.target]))
            if trained:
                return 1
        # One that is gone must not turn a backend's failure into the agent's fault, a model that it never named.
        there = [model for model in route.fallbacks if model in self._tables.current.routes]
        call.models = (call.request.model, *there)
        return len(call.models)

    async def _send(self, call: RunningCall) -> BackendAnswer:
        memory, route = self._memory, self._tables.current.routes.get(call.request.model)
        remembers = memory.serves(route, call.caller)
        if remembers:
            with contextlib.suppress(BackendUnavailable):  # the sender knows what then: fallbacks
                if (found := memory.find(self._plan(call, FIRST), call.caller)) is not None:
                    call.remembered = True
                    return found
        answer = await self._sender.send(lambda step: self._plan(call, step), lambda at: self._routes(call, at))
        if remembers:
            call.recording = memory.recording(answer, call.caller)
        return answer

    async def _answer(self, call: RunningCall, sink: Sink) -> None:
        async with sink.watch() as watch:
            answer = await self._send(call)
            exchange = answer.dispatch.exchange
            if exchange is not call.exchange:
                # Of several plans (a hedge makes two) that of the answer counts; versions were noted in the last one.
                call.choice, call.exchange = answer.dispatch.choice, exchange
                if exchange.captured:
                    _note_version(call.choice, exchange, self._tables.current)
            try:
                if answer.status in _KEY_REFUSED:
                    raise BackendUnavailable("The backend refused the proxy's own key.")
                call.status = answer.status
                if answer.status != 200:
                    call.error_type = f"backend_{answer.status}"
                    await _pass_refusal(exchange, answer, sink, watch)
                    return
                call.answered = True
                if exchange.whole_as_stream:
                    await _pass_whole_as_stream(call, exchange, answer, sink, watch)
                elif exchange.stream and answer.content_type.startswith(_EVENT_STREAM):
                    await self._pass_stream(call, exchange, answer, sink, watch)
                else:
                    await _pass_whole(call, exchange, answer, sink, watch)
                call.error_type = ""
                if call.recording is not None:
                    call.recording.end(exchange.reader.collected)
            except RecursionError:
                raise BackendUnavailable("The backend's answer is nested too deeply.") from None
            finally:
                answer.close()

    async def _pass_stream(
        self, call: RunningCall, exchange: Exchange, answer: BackendAnswer, sink: Sink, watch: Watch
    ) -> None:
        call.answering = True
        await sink.begin(answer.content_type, answer.headers)
        reader = exchange.reader
        splitter = EventSplitter(self._max_event_bytes)
        chunk: bytes = answer.body
        while chunk:
            call.size_bytes += len(chunk)
            if call.recording is not None:
                call.recording.add(chunk)
            passed = joined([reader.event(event) for event in splitter.feed(chunk)])
            if passed:
                if call.first_byte_s is None:
                    call.first_byte_s = time.perf_counter() - call.started
                await sink.piece(passed)
            chunk = await answer.piece()
        # A server that does not end its last event; whether it was whole, the capture judges.
        unfinished = splitter.rest()
        last = (reader.event(unfinished) if unfinished else b"") + reader.end()
        if last:
            await sink.piece(last)
        watch.settle()
        await sink.end()

    def _finish(self, call: RunningCall) -> None:
        self._running.discard(call)
        elapsed_s = time.perf_counter() - call.started
        collected = None
        if call.exchange is not None and call.answered:
            collected = call.exchange.reader.collected
            try:
                call.counts = token_counts(collected.usage)
            except (ValueError, RecursionError):  # not JSON, not UTF-8, or nested too deeply
                collected.malformed = True
        used = call.permit.close(
            None if call.remembered else call.counts,
            collected=None if call.remembered else collected,
            target=None if call.choice is None else call.choice.target,
            failed=bool(call.error_type),
        )
        metrics = self._metrics.calls
        metrics.in_flight -= 1
        metrics.ended(
            choice=call.choice,
            api=call.request.api.name,
            status=call.status,
            elapsed_s=elapsed_s,
            first_token_s=call.first_byte_s,
            streamed=call.request.stream,
            used=used,
        )
        if call.error_type:
            metrics.failed(call.error_type, call.status)
        attribution = call.caller.attribution
        if attribution is None or call.place is None:
            return
        exchange = call.exchange
        finished = FinishedCall(
            attribution=attribution,
            api=call.request.api if exchange is None else exchange.api,
            model=call.request.model,
            target=None if call.choice is None else call.choice.target,
            backend=None if call.choice is None else call.choice.backend,
            stream=call.request.stream,
            fields={} if exchange is None else exchange.fields,
            collected=collected,
            captured=exchange is not None and exchange.captured,
            http_status=call.status,
            error_type=call.error_type,
            start_ns=call.start_ns,
            end_ns=call.start_ns + int(elapsed_s * 1e9),
            first_byte_s=call.first_byte_s,
            resend_count=call.head.resend_count,
            place=call.place,
            agent_name=call.head.agent_name,
            size_bytes=call.size_bytes,
        )
        self._queue.put(finished)
        if self._traced is not None:
            self._traced(finished)
        self._ledger.end(
            attribution.attempt,
            recorded=True,
            infra_failure=is_infrastructure(call.status),
            throttled=is_throttled(call.status),
        )


def _note_version(choice: Choice, exchange: Exchange, table: RoutingTable) -> None:
    collected = exchange.reader.collected
    changes = collected.policy_changes
    version = table.version_of(choice.route.model, choice.target)
    if version is None or version == (changes[-1].version if changes else choice.target.policy_version):
        return
    pieces = {index: len(kept.token_ids) for index, kept in collected.choices.items()}
    changes.append(PolicyChange(version=version, pieces=pieces))


async def _pass_refusal(exchange: Exchange, answer: BackendAnswer, sink: Sink, watch: Watch) -> None:
    extra: list[Header] = [(SOURCE_HEADER, b"backend"), *answer.headers]
    body = exchange.refusal(answer.status, answer.body)
    watch.settle()
    await sink.whole(answer.status, body, answer.content_type if body is answer.body else JSON_TYPE, extra)


async def _pass_whole(call: RunningCall, exchange: Exchange, answer: BackendAnswer, sink: Sink, watch: Watch) -> None:
    body = answer.body
    call.size_bytes += len(body)
    if call.recording is not None:
        call.recording.add(body)
    passed = exchange.whole(body)
    call.answering = True
    call.first_byte_s = time.perf_counter() - call.started
    watch.settle()
    await sink.whole(200, passed, answer.content_type, answer.headers)


async def _pass_whole_as_stream(
    call: RunningCall, exchange: Exchange, answer: BackendAnswer, sink: Sink, watch: Watch
) -> None:
    call.size_bytes += len(answer.body)
    passed = exchange.whole(answer.body)
    call.answering = True
    call.first_byte_s = time.perf_counter() - call.started
    await sink.begin(_EVENT_STREAM, answer.headers)
    await sink.piece(passed)
    watch.settle()
    await sink.end()


async def _report(call: RunningCall, error: FulmenError | Refused, sink: Sink) -> None:
    """Tells the caller what failed: as an answer, or within the stream that has begun."""
    api, told = call.request.api, call_error(error)
    if not call.answering or isinstance(error, Refused):
        await sink.whole(told.status, error_document(told, api.dialect), JSON_TYPE, headers_of(error))
        return
    last, sequence = b"", 0
    if api.name is ApiName.RESPONSES and call.exchange is not None:
        # A translator numbers the events and ends them itself; those of a backend have been counted.
        last, sequence = call.exchange.reader.end(), call.exchange.reader.collected.sequence
    await sink.piece(last or error_event(told, api.name, api.dialect, sequence=sequence))
    await sink.end()
