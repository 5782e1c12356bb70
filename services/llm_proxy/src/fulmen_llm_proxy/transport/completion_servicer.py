"""fulmen.llm_proxy.v1.CompletionService: model calls over gRPC."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any, TypeVar

import grpc.aio

from fulmen.errors import ArgumentInvalid, Draining, MessageTooLarge
from fulmen.ids import is_conversation_id
from fulmen.llm_proxy.v1 import completion_service_pb2, completion_service_pb2_grpc
from fulmen_llm_proxy.apis.api import Api, asks_for_stream
from fulmen_llm_proxy.apis.errors import error_document
from fulmen_llm_proxy.apis.registry import BY_PATH
from fulmen_llm_proxy.attempts.caller import caller_of
from fulmen_llm_proxy.calls.failures import Refused, call_error, headers_of
from fulmen_llm_proxy.calls.pipeline import CallPipeline
from fulmen_llm_proxy.calls.request_buffer import RequestBuffer
from fulmen_llm_proxy.calls.running_call import MAX_AGENT_NAME, CallHead
from fulmen_llm_proxy.transport.rpc_answer_writer import EventAnswerWriter, WholeAnswerWriter
from fulmen_service_kit.http.wire import JSON_TYPE
from fulmen_service_kit.rpc.message_sizes import MAX_SENT_BYTES
from fulmen_service_kit.security.auth import current_caller, require_project

Answer = TypeVar("Answer", completion_service_pb2.CompleteResponse, completion_service_pb2.StreamCompleteResponse)


class CompletionServicer(completion_service_pb2_grpc.CompletionServiceServicer):
    """Serves model calls to callers without an HTTP client."""

    def __init__(
        self,
        *,
        calls: CallPipeline,
        draining: asyncio.Event,
        buffer: RequestBuffer,
        max_request_bytes: int,
        max_event_bytes: int,
        write_timeout_s: float,
    ) -> None:
        """Sets the pipeline, which HTTP calls use, too.

        Args:
            max_request_bytes: largest request body, bytes.
            max_event_bytes: largest single event of a stream, bytes.
            write_timeout_s: timeout of a caller that does not read while events wait, seconds; then its call ends.
        """
        self._calls = calls
        self._draining = draining
        self._buffer = buffer
        self._max_request_bytes = max_request_bytes
        self._max_event_bytes = max_event_bytes
        self._write_timeout_s = write_timeout_s
        self._running: set[asyncio.Task[Any]] = set()

    async def drain(self, limit_s: float) -> None:
        """Waits until no call is running; cancels those that still run after `limit_s` seconds."""
        if not self._running:
            return
        _, left = await asyncio.wait(self._running, timeout=limit_s)
        for call in left:
            call.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    async def Complete(
        self, request: completion_service_pb2.CompleteRequest, context: grpc.aio.ServicerContext
    ) -> completion_service_pb2.CompleteResponse:
        """Serves a call."""
        api = self._api(request.path, request.body_json)
        if asks_for_stream(request.body_json):
            raise ArgumentInvalid("The body requests a stream; use StreamComplete.")
        writer = WholeAnswerWriter(lambda: self._is_given_up(context))
        with self._counted():
            await self._run(api, request, writer, context)
        return sendable(writer.answer)

    async def StreamComplete(
        self, request: completion_service_pb2.StreamCompleteRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[completion_service_pb2.StreamCompleteResponse]:
        """Serves a call with a streamed answer."""
        api = self._api(request.path, request.body_json)
        over = False
        writer = EventAnswerWriter(
            lambda: over, max_event_bytes=self._max_event_bytes, write_timeout_s=self._write_timeout_s
        )
        call = asyncio.create_task(self._run(api, request, writer, context), name="stream-complete")
        ended, rpc = asyncio.Event(), asyncio.current_task()

        def end(_: asyncio.Task[None]) -> None:
            # If the call fails unexpectedly without writing, the caller must not wait forever.
            ended.set()
            if writer.given_up and rpc is not None:
                rpc.cancel()  # it waits for the caller to read a message

        call.add_done_callback(end)
        with self._counted():
            try:
                while (message := await _next_message(writer, ended)) is not None:
                    yield sendable(message)
                await call
            finally:
                over = not call.done() and self._is_given_up(context)
                call.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await call

    def _is_given_up(self, context: grpc.aio.ServicerContext) -> bool:
        """Returns whether a cancelled handler was cancelled by its caller rather than by a shutdown."""
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
            raise ArgumentInvalid(f"Path {path[:200]} not found. Served: {', '.join(BY_PATH)}.")
        if len(body) > self._max_request_bytes:
            raise MessageTooLarge(
                f"The request body exceeds {self._max_request_bytes} bytes.", limit_bytes=self._max_request_bytes
            )
        return api

    async def _run(
        self,
        api: Api,
        request: completion_service_pb2.CompleteRequest | completion_service_pb2.StreamCompleteRequest,
        writer: WholeAnswerWriter | EventAnswerWriter,
        context: grpc.aio.ServicerContext,
    ) -> None:
        left_s = context.time_remaining()
        caller = caller_of(current_caller(), require_project(request.project) if request.project else "")
        head = CallHead(
            agent_name=request.agent_name[:MAX_AGENT_NAME],
            conversation=request.conversation if is_conversation_id(request.conversation) else "",
            timeout_s=None if left_s is None else max(0.0, left_s),
        )
        try:
            with self._buffer.share() as share:
                try:
                    share.reserve(len(request.body_json))
                except Refused as error:
                    self._calls.reject(caller.attempt, error)
                    raise
                await self._calls.run(api, caller, head, request.body_json, writer)
        except Refused as error:
            # A refusal that exists in HTTP only; errors of the catalogue become rpc errors.
            await writer.whole(
                error.status, error_document(call_error(error), api.dialect), JSON_TYPE, headers_of(error)
            )


def sendable(message: Answer) -> Answer:
    """Returns a message that is not too large for the callers of an rpc.

    Raises:
        MessageTooLarge: if it is.
    """
    if message.ByteSize() > MAX_SENT_BYTES:
        raise MessageTooLarge(
            f"The answer exceeds {MAX_SENT_BYTES} bytes: stream it, or call over HTTP.", limit_bytes=MAX_SENT_BYTES
        )
    return message


async def _next_message(
    writer: EventAnswerWriter, ended: asyncio.Event
) -> completion_service_pb2.StreamCompleteResponse | None:
    """Returns the next message; None at the end, even if the call did not signal it."""
    if not writer.messages.empty():
        return writer.messages.get_nowait()
    message = asyncio.ensure_future(writer.messages.get())
    end = asyncio.ensure_future(ended.wait())
    try:
        await asyncio.wait([message, end], return_when=asyncio.FIRST_COMPLETED)
        if message.done():
            return message.result()
        return None if writer.messages.empty() else writer.messages.get_nowait()
    finally:
        message.cancel()
        end.cancel()
