"""Writes an answer over gRPC: complete, or one message per event."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from fulmen.llm_proxy.v1 import completion_service_pb2
from fulmen_llm_proxy.apis.sse import EventSplitter, event_data, event_name
from fulmen_llm_proxy.calls.answer_writer import Header
from fulmen_service_kit.http.wire import CallerGone

_OK = 200
_BUFFERED_EVENTS = 64
"""Maximum number of events buffered for a slow caller; then the backend waits."""


class RpcDisconnectWatch:
    """Distinguishes an rpc cancelled by its caller from a shutdown of the proxy."""

    def __init__(self, is_cancelled: Callable[[], bool]) -> None:
        self._is_cancelled = is_cancelled

    async def __aenter__(self) -> Self:
        """Starts watching; gRPC itself cancels the task of a cancelled rpc."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        """Converts a cancellation by the caller to CallerGone."""
        task = asyncio.current_task()
        if kind is asyncio.CancelledError and task is not None and self._is_cancelled():
            task.uncancel()
            raise CallerGone from error

    def settle(self) -> None:
        """Does nothing: gRPC reports no disconnect after the answer."""


class WholeAnswerWriter:
    """Keeps a complete answer."""

    def __init__(self, is_cancelled: Callable[[], bool]) -> None:
        self._is_cancelled = is_cancelled
        self.answer = completion_service_pb2.CompleteResponse()

    def watch(self) -> RpcDisconnectWatch:
        """Returns a watch for the cancellation of the rpc."""
        return RpcDisconnectWatch(self._is_cancelled)

    async def whole(self, status: int, body: bytes, content_type: bytes, extra: Sequence[Header] = ()) -> None:
        """Stores the answer."""
        self.answer = completion_service_pb2.CompleteResponse(
            http_status=status, body_json=body, retry_after_seconds=_retry_after_s(extra)
        )

    async def begin(self, content_type: bytes, extra: Sequence[Header] = ()) -> None:
        """Never called: a request for a stream is refused before."""
        raise RuntimeError("not a stream")

    async def piece(self, data: bytes) -> None:
        """Never called."""
        raise RuntimeError("not a stream")

    async def end(self) -> None:
        """Does nothing."""


class EventAnswerWriter:
    """Passes events on as messages; waits while the caller lags behind."""

    def __init__(self, is_cancelled: Callable[[], bool], *, max_event_bytes: int, write_timeout_s: float) -> None:
        self._is_cancelled = is_cancelled
        self._splitter = EventSplitter(max_event_bytes)
        self._first = True
        self._write_timeout_s = write_timeout_s
        self.given_up = False
        """Whether the caller has not read for too long."""
        self.messages: asyncio.Queue[completion_service_pb2.StreamCompleteResponse | None] = asyncio.Queue(
            _BUFFERED_EVENTS
        )

    def watch(self) -> RpcDisconnectWatch:
        """Returns a watch for the cancellation of the rpc."""
        return RpcDisconnectWatch(self._is_cancelled)

    async def whole(self, status: int, body: bytes, content_type: bytes, extra: Sequence[Header] = ()) -> None:
        """Writes an error, or the answer of a backend that did not stream."""
        message = completion_service_pb2.StreamCompleteResponse(
            http_status=status, event_json=body, retry_after_seconds=_retry_after_s(extra)
        )
        await self._put(message)
        await self.end()

    async def begin(self, content_type: bytes, extra: Sequence[Header] = ()) -> None:
        """Does nothing: the first event carries the status."""

    async def piece(self, data: bytes) -> None:
        """Writes events."""
        for event in self._splitter.feed(data):
            payload = event_data(event)
            if payload is None:
                continue  # a comment; gRPC has its own keep-alive
            message = completion_service_pb2.StreamCompleteResponse(event_json=payload, event_name=event_name(event))
            if self._first:
                self._first, message.http_status = False, _OK
            await self._put(message)

    async def end(self) -> None:
        """Ends the stream."""
        await self._put(None)

    async def _put(self, message: completion_service_pb2.StreamCompleteResponse | None) -> None:
        if not self.messages.full():
            self.messages.put_nowait(message)
            return
        try:
            async with asyncio.timeout(self._write_timeout_s):
                await self.messages.put(message)
        except TimeoutError:
            self.given_up = True
            raise CallerGone from None


def _retry_after_s(extra: Sequence[Header]) -> float:
    return next((float(value) for name, value in extra if name == b"retry-after" and value.isdigit()), 0.0)
