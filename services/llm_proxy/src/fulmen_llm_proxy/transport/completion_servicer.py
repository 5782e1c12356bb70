"""fulmen.llm_proxy.v1.CompletionService: the calls of the HTTP door over gRPC."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc.aio

from fulmen.errors import ArgumentInvalid, Draining, MessageTooLarge
from fulmen.llm_proxy.v1 import completion_service_pb2, completion_service_pb2_grpc
from fulmen_llm_proxy.apis.api import Api, asks_for_stream
from fulmen_llm_proxy.apis.errors import error_document
from fulmen_llm_proxy.apis.registry import BY_PATH
from fulmen_llm_proxy.attempts.caller import caller_of
from fulmen_llm_proxy.calls.body_room import BodyRoom
from fulmen_llm_proxy.calls.failures import Refused, call_error, headers_of
from fulmen_llm_proxy.calls.pipeline import CallPipeline
from fulmen_llm_proxy.calls.running_call import MAX_AGENT_NAME, CallHead
from fulmen_llm_proxy.transport.rpc_sink import EventSink, WholeSink
from fulmen_service_kit.auth import current_caller
from fulmen_service_kit.http_wire import JSON_TYPE


class CompletionServicer(completion_service_pb2_grpc.CompletionServiceServicer):
    """Makes calls for callers without an HTTP client."""

    def __init__(
        self,
        *,
        calls: CallPipeline,
        draining: asyncio.Event,
        room: BodyRoom,
        max_request_bytes: int,
        max_event_bytes: int,
        write_timeout_s: float,
    ) -> None:
        """Takes the pipeline that HTTP calls go through too.

        Args:
            max_request_bytes: largest body of a request.
            max_event_bytes: largest single event of a stream.
            write_timeout_s: how long a caller may take no event while many wait for it, seconds; then its call ends.
        """
        self._calls = calls
        self._draining = draining
        self._room = room
        self._max_request_bytes = max_request_bytes
        self._max_event_bytes = max_event_bytes
        self._write_timeout_s = write_timeout_s
        self._running: set[asyncio.Task[Any]] = set()

    async def drain(self, limit_s: float) -> None:
        """Returns when no call runs any more; cuts those that still run after `limit_s` seconds. New ones are refused."""
        if not self._running:
            return
        _, left = await asyncio.wait(self._running, timeout=limit_s)
        for call in left:
            call.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    async def Complete(
        self, request: completion_service_pb2.CompleteRequest, context: grpc.aio.ServicerContext
    ) -> completion_service_pb2.CompleteResponse:
        """Makes one call."""
        api = self._api(request.path, request.body_json)
        if asks_for_stream(request.body_json):
            raise ArgumentInvalid("The body asks for a stream; call StreamComplete for one.")
        sink = WholeSink(lambda: self._is_given_up(context))
        with self._counted():
            await self._run(api, request, sink)
        return sink.answer

    async def StreamComplete(
        self, request: completion_service_pb2.StreamCompleteRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[completion_service_pb2.StreamCompleteResponse]:
        """Makes one call whose answer is streamed."""
        api = self._api(request.path, request.body_json)
        over = False
        sink = EventSink(lambda: over, max_event_bytes=self._max_event_bytes, write_timeout_s=self._write_timeout_s)
        call = asyncio.create_task(self._run(api, request, sink), name="stream-complete")
        ended, rpc = asyncio.Event(), asyncio.current_task()

        def end(_: asyncio.Task[None]) -> None:
            # The call may fail without a word to the sink, by a fault of ours: the caller must not wait for ever then.
            ended.set()
            if sink.given_up and rpc is not None:
                rpc.cancel()  # it waits for the caller to take a message

        call.add_done_callback(end)
        with self._counted():
            try:
                while (message := await _next_message(sink, ended)) is not None:
                    yield message
                await call
            finally:
                over = not call.done() and self._is_given_up(context)
                call.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await call

    def _is_given_up(self, context: grpc.aio.ServicerContext) -> bool:
        """Tells, in a handler that was cancelled, whether its caller gave the rpc up; else the proxy stops."""
        return bool(context.cancelled()) or not self._draining.is_set()

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        rpc = asyncio.current_task()
        if rpc is None:
            raise RuntimeError("a handler runs in a task")
        self._running.add(rpc)
        try:
            yield
        finally:
            self._running.discard(rpc)

    def _api(self, path: str, body: bytes) -> Api:
        if self._draining.is_set():
            raise Draining("The proxy is shutting down; try again.")
        api = BY_PATH.get(path)
        if api is None:
            raise ArgumentInvalid(f"There is nothing at {path[:200]}. Served: {', '.join(BY_PATH)}.")
        if len(body) > self._max_request_bytes:
            raise MessageTooLarge(
                f"The body is over the limit of {self._max_request_bytes} bytes.", limit_bytes=self._max_request_bytes
            )
        return api

    async def _run(
        self,
        api: Api,
        request: completion_service_pb2.CompleteRequest | completion_service_pb2.StreamCompleteRequest,
        sink: WholeSink | EventSink,
    ) -> None:
        head, caller = CallHead(agent_name=request.agent_name[:MAX_AGENT_NAME]), caller_of(current_caller())
        try:
            with self._room.held() as held:
                try:
                    held.take(len(request.body_json))
                except Refused as error:
                    self._calls.note_refused(caller, error)
                    raise
                await self._calls.run(api, caller, head, request.body_json, sink)
        except Refused as error:
            # What only HTTP can say; the errors of the catalogue are the rpc's own.
            await sink.whole(error.status, error_document(call_error(error), api.dialect), JSON_TYPE, headers_of(error))


async def _next_message(sink: EventSink, ended: asyncio.Event) -> completion_service_pb2.StreamCompleteResponse | None:
    """Returns the next message; None when there is no more, whether or not the call said so."""
    if not sink.messages.empty():
        return sink.messages.get_nowait()
    message = asyncio.ensure_future(sink.messages.get())
    end = asyncio.ensure_future(ended.wait())
    try:
        await asyncio.wait([message, end], return_when=asyncio.FIRST_COMPLETED)
        if message.done():
            return message.result()
        return None if sink.messages.empty() else sink.messages.get_nowait()
    finally:
        message.cancel()
        end.cancel()
