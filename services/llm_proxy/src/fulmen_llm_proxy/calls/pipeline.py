"""Runs a call: answers the caller first, records the call afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import time

import msgspec

from fulmen.errors import BackendUnavailable, Draining, FulmenError
from fulmen_llm_proxy.apis.api import Api, ApiName, encode, joined
from fulmen_llm_proxy.apis.errors import CALLER_GONE, error_document, error_event
from fulmen_llm_proxy.apis.kept_responses import KeptReader
from fulmen_llm_proxy.apis.sse import EventSplitter
from fulmen_llm_proxy.attempts.caller import Caller
from fulmen_llm_proxy.attempts.guard import AttemptGuard, AttemptTie
from fulmen_llm_proxy.backends.call_plan import CallPlan
from fulmen_llm_proxy.backends.client import BackendAnswer
from fulmen_llm_proxy.calls.answer_headers import headers_of_call
from fulmen_llm_proxy.calls.answer_memory import AnswerMemory
from fulmen_llm_proxy.calls.answer_writer import AnswerWriter, DisconnectWatch, Header
from fulmen_llm_proxy.calls.failures import SOURCE_HEADER, Refused, call_error, code_of, headers_of, status_of
from fulmen_llm_proxy.calls.gate import Gate
from fulmen_llm_proxy.calls.guarding import CallGuards
from fulmen_llm_proxy.calls.planner import CallPlanner, note_version
from fulmen_llm_proxy.calls.recorder import CallRecorder
from fulmen_llm_proxy.calls.replay.replays import Replays
from fulmen_llm_proxy.calls.responses.kept_responses import KeptResponses
from fulmen_llm_proxy.calls.running_call import CallHead, RunningCall
from fulmen_llm_proxy.calls.sender import FIRST_TRY, CallSender
from fulmen_llm_proxy.capture.span_place import place_of
from fulmen_llm_proxy.routing.balancing import CallAffinity
from fulmen_llm_proxy.routing.late_routes import LateRoutes
from fulmen_llm_proxy.routing.table import RoutingTable
from fulmen_llm_proxy.routing.table_holder import TableHolder
from fulmen_service_kit.http.wire import JSON_TYPE, CallerGone

_KEY_REFUSED = (401, 403)
_EVENT_STREAM = b"text/event-stream"


class CallPipeline:
    """Answers calls and records them."""

    def __init__(
        self,
        *,
        gate: Gate,
        guard: AttemptGuard,
        tables: TableHolder,
        late_routes: LateRoutes,
        planner: CallPlanner,
        sender: CallSender,
        memory: AnswerMemory,
        replays: Replays,
        kept: KeptResponses,
        recorder: CallRecorder,
        guards: CallGuards,
        max_event_bytes: int,
    ) -> None:
        """Sets the stages of a call.

        Args:
            max_event_bytes: largest single event of a stream.
        """
        self.gate = gate
        self._guard = guard
        self._tables = tables
        self._late_routes = late_routes
        self._planner = planner
        self._sender = sender
        self._memory = memory
        self._replays = replays
        self._kept = kept
        self._recorder = recorder
        self._guards = guards
        self._max_event_bytes = max_event_bytes
        self._running: set[RunningCall] = set()
        tables.follow(self._note_versions)

    async def run(self, api: Api, caller: Caller, head: CallHead, body: bytes, writer: AnswerWriter) -> None:
        """Answers one request.

        Raises:
            FulmenError, Refused: if the request is refused before it becomes a call; nothing was sent.
        """
        try:
            call = self._begin(api, caller, head, body)
        except (FulmenError, Refused) as error:
            self._recorder.reject(error)
            raise
        self._running.add(call)
        self._recorder.begin(call)
        attribution = caller.attribution
        writer = self._guards.guarded(call, writer)
        try:
            if attribution is None:
                await self._answer(call, writer)
            else:
                with AttemptTie(self._guard, attribution):
                    await self._answer(call, writer)
        except CallerGone as gone:
            call.error_type = CALLER_GONE
            call.was_cut_off = gone.was_cut_off and not call.answering
            call.status = call.status if call.answering else 0
        except (FulmenError, Refused) as error:
            call.status, call.error_type = status_of(error), code_of(error)
            await _report(call, error, writer)
        except asyncio.CancelledError:
            call.status, call.error_type = status_of(Draining("")), "proxy_stopped"
            raise
        finally:
            self._running.discard(call)
            self._recorder.finish(call)
            if call.continued is not None:
                call.continued.share.release()

    async def await_route(self, model: str, caller: Caller) -> None:
        """Waits for the route of a model that another replica has just published; see `LateRoutes`.

        Raises:
            Unavailable: if the store has the route, and this replica does not follow in time.
        """
        if not self._tables.current.serves(model, caller.models_of):
            await self._late_routes.await_route(model, caller.models_of)

    def reject(self, attempt: str, error: FulmenError | Refused) -> None:
        """Counts a request of an attempt, or of another caller if it is empty, that is refused before it becomes a call."""
        self._recorder.reject(error)
        self._recorder.charge_not_served(attempt, error)

    def _begin(self, api: Api, caller: Caller, head: CallHead, body: bytes) -> RunningCall:
        request = api.parse(body)
        model = self._tables.current.resolved(request.model, caller.models_of)
        if model != request.model:
            fields = {**request.fields, "model": msgspec.Raw(encode(model))}
            request = msgspec.structs.replace(request, model=model, fields=fields)
        attribution = caller.attribution
        try:
            permit = self.gate.admit(caller, request)
        except (FulmenError, Refused) as error:
            self._recorder.charge_not_served(caller.attempt, error)
            raise
        place = (
            None if attribution is None else place_of(head.trace_parent, attribution.attempt, span_id=head.request_id)
        )
        return RunningCall(
            request=request,
            caller=caller,
            head=head,
            permit=permit,
            affinity=CallAffinity(caller.attempt or _conversation(caller, head), request.fields),
            start_ns=time.time_ns(),
            started=time.perf_counter(),
            size_bytes=len(body),
            place=place,
            # A call that is not recorded has no span: the backend's spans then belong to the caller's.
            headers=head.pass_on if place is None else {**head.pass_on, "traceparent": place.header},
        )

    def _note_versions(self, table: RoutingTable) -> None:
        """Records the running calls whose target now serves another policy version."""
        for call in self._running:
            if call.choice is not None and call.plan is not None and call.plan.captured:
                note_version(call.choice, call.plan, table)

    async def _send(self, call: RunningCall) -> BackendAnswer:
        memory, model = self._memory, call.request.model
        await self.await_route(model, call.caller)
        attribution = call.caller.attribution
        if (
            attribution is not None
            and attribution.terms.continues
            and (replayed := await self._replays.find(call, attribution)) is not None
        ):
            return replayed
        route = self._tables.current.routes.get(model)
        cacheable = memory.serves(route, call.caller)
        if cacheable:
            with contextlib.suppress(BackendUnavailable):  # the sender then tries the fallbacks
                if (found := await memory.find(self._planner.plan(call, FIRST_TRY), call.caller)) is not None:
                    call.from_cache = True
                    return found
        answer = await self._sender.send(call)
        if cacheable:
            call.recording = memory.recording(answer, call.caller)
        return answer

    async def _answer(self, call: RunningCall, writer: AnswerWriter) -> None:
        async with writer.watch() as watch:
            if call.request.api.name is ApiName.RESPONSES:
                await self._kept.resume(call)
            await self._guards.before(call)
            answer = await self._send(call)
            plan = answer.dispatch.plan
            if plan is not call.plan:
                # A hedge makes two plans. The one that was answered counts; versions were noted in the latest.
                call.choice, call.plan = answer.dispatch.choice, plan
                if plan.captured:
                    note_version(call.choice, plan, self._tables.current)
            try:
                await self._recorder.opened(call)
                if answer.status in _KEY_REFUSED:
                    raise BackendUnavailable("The backend refused the proxy's own key.")
                call.status = answer.status
                if answer.status != 200:
                    call.error_type = f"backend_{answer.status}"
                    await _pass_refusal(call, plan, answer, writer, watch)
                    return
                call.answered = True
                if plan.whole_as_stream:
                    await self._pass_whole_as_stream(call, plan, answer, writer, watch)
                elif plan.stream and answer.content_type.startswith(_EVENT_STREAM):
                    await self._pass_stream(call, plan, answer, writer, watch)
                else:
                    await self._pass_whole(call, plan, answer, writer, watch)
                call.error_type = ""
                if call.recording is not None:
                    call.recording.end(plan.reader.collected)
            except RecursionError:
                raise BackendUnavailable("The backend's answer is nested too deeply.") from None
            finally:
                answer.close()

    async def _pass_stream(
        self, call: RunningCall, plan: CallPlan, answer: BackendAnswer, writer: AnswerWriter, watch: DisconnectWatch
    ) -> None:
        call.answering = True
        await writer.begin(answer.content_type, [*answer.headers, *headers_of_call(call)])
        reader = plan.reader
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
                await writer.piece(passed)
            chunk = await answer.piece()
        # Some servers do not terminate their last event; the capture decides whether it was complete.
        unfinished = splitter.rest()
        last = (reader.event(unfinished) if unfinished else b"") + reader.end()
        if isinstance(reader, KeptReader):
            last += await self._kept.finish(call, reader)
        if last:
            await writer.piece(last)
        watch.settle()
        await writer.end()

    async def _pass_whole(
        self, call: RunningCall, plan: CallPlan, answer: BackendAnswer, writer: AnswerWriter, watch: DisconnectWatch
    ) -> None:
        body = answer.body
        call.size_bytes += len(body)
        if call.recording is not None:
            call.recording.add(body)
        passed = await self._whole(call, plan, body)
        call.answering = True
        call.first_byte_s = time.perf_counter() - call.started
        watch.settle()
        await writer.whole(200, passed, answer.content_type, [*answer.headers, *headers_of_call(call, whole=True)])

    async def _pass_whole_as_stream(
        self, call: RunningCall, plan: CallPlan, answer: BackendAnswer, writer: AnswerWriter, watch: DisconnectWatch
    ) -> None:
        call.size_bytes += len(answer.body)
        passed = await self._whole(call, plan, answer.body)
        call.answering = True
        call.first_byte_s = time.perf_counter() - call.started
        await writer.begin(_EVENT_STREAM, [*answer.headers, *headers_of_call(call, whole=True)])
        await writer.piece(passed)
        watch.settle()
        await writer.end()

    async def _whole(self, call: RunningCall, plan: CallPlan, body: bytes) -> bytes:
        """Returns a complete answer in the caller's API, which is stored first if it has to be."""
        passed = plan.whole(body)
        return passed + await self._kept.finish(call, plan.reader) if isinstance(plan.reader, KeptReader) else passed


def _conversation(caller: Caller, head: CallHead) -> str | None:
    """Returns the conversation that a call without an attempt names, which stays with its variant and replica."""
    return f"{caller.project}/conversations/{head.conversation}" if head.conversation else None


async def _pass_refusal(
    call: RunningCall, plan: CallPlan, answer: BackendAnswer, writer: AnswerWriter, watch: DisconnectWatch
) -> None:
    extra: list[Header] = [(SOURCE_HEADER, b"backend"), *answer.headers, *headers_of_call(call)]
    body = plan.refusal(answer.status, answer.body)
    watch.settle()
    await writer.whole(answer.status, body, answer.content_type if body is answer.body else JSON_TYPE, extra)


async def _report(call: RunningCall, error: FulmenError | Refused, writer: AnswerWriter) -> None:
    """Reports an error to the caller: as the answer, or within the stream that has started."""
    api, reported = call.request.api, call_error(error)
    if not call.answering or isinstance(error, Refused):
        extra = [*headers_of(error), *headers_of_call(call)]
        await writer.whole(reported.status, error_document(reported, api.dialect), JSON_TYPE, extra)
        return
    last, sequence = b"", 0
    if api.name is ApiName.RESPONSES and call.plan is not None:
        # A translator numbers and ends its events itself; those of a backend have been counted.
        reader = call.plan.reader
        with contextlib.suppress(BackendUnavailable):  # raised once, by the first of two translators
            last = reader.end()
        last, sequence = last or reader.end(), reader.collected.sequence
    await writer.piece(last or error_event(reported, api.name, api.dialect, sequence=sequence))
    await writer.end()
