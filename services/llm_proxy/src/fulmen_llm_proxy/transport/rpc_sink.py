"""An answer over gRPC: a whole one, or one message an event."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from fulmen.llm_proxy.v1 import completion_service_pb2
from fulmen_llm_proxy.apis.sse import EventSplitter, event_data, event_name
from fulmen_llm_proxy.calls.sink import Header
from fulmen_service_kit.http_wire import CallerGone

_OK = 200
_BUFFERED_EVENTS = 64
"""Events that may wait for a slow caller; beyond, the backend waits."""


class RpcWatch:
    """Tells a cancelled rpc from a proxy that stops: the first is the caller's leaving."""

    def __init__(self, is_cancelled: Callable[[], bool]) -> None:
        self._is_cancelled = is_cancelled

    async def __aenter__(self) -> Self:
        """Begins; gRPC itself cancels the task of a cancelled rpc."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        """Turns the cancellation of the rpc into CallerGone."""
        task = asyncio.current_task()
        if kind is asyncio.CancelledError and task is not None and self._is_cancelled():
            task.uncancel()
            raise CallerGone from error

    def settle(self) -> None:
        """Does nothing: a caller that leaves after its answer is no news here."""


class WholeSink:
    """Takes a whole answer."""

    def __init__(self, is_cancelled: Callable[[], bool]) -> None:
        self._is_cancelled = is_cancelled
        self.answer = completion_service_pb2.CompleteResponse()

    def watch(self) -> RpcWatch:
        """Returns a watch for the rpc's cancellation."""
        return RpcWatch(self._is_cancelled)

    async def whole(self, status: int, body: bytes, content_type: bytes, extra: Sequence[Header] = ()) -> None:
        """Keeps the answer."""
        self.answer = completion_service_pb2.CompleteResponse(
            http_status=status, body_json=body, retry_after_seconds=_retry_after_s(extra)
        )

    async def begin(self, content_type: bytes, extra: Sequence[Header] = ()) -> None:
        """Is never called: a request that asks for a stream is refused before."""
        raise RuntimeError("a whole answer was asked for")

    async def piece(self, data: bytes) -> None:
        """Is never called."""
        raise RuntimeError("a whole answer was asked for")

    async def end(self) -> None:
        """Does nothing."""


class EventSink:
    """Hands events on as messages; waits while the caller is behind by many."""

    def __init__(self, is_cancelled: Callable[[], bool], *, max_event_bytes: int, write_timeout_s: float) -> None:
        self._is_cancelled = is_cancelled
        self._splitter = EventSplitter(max_event_bytes)
        self._first = True
        self._write_timeout_s = write_timeout_s
        self.given_up = False
        """The caller took nothing for too long."""
        self.messages: asyncio.Queue[completion_service_pb2.StreamCompleteResponse | None] = asyncio.Queue(
            _BUFFERED_EVENTS
        )

    def watch(self) -> RpcWatch:
        """Returns a watch for the rpc's cancellation."""
        return RpcWatch(self._is_cancelled)

    async def whole(self, status: int, body: bytes, content_type: bytes, extra: Sequence[Header] = ()) -> None:
        """Hands a refusal on, or the answer of a backend that did not stream."""
        message = completion_service_pb2.StreamCompleteResponse(
            http_status=status, event_json=body, retry_after_seconds=_retry_after_s(extra)
        )
        await self._put(message)
        await self.end()

    async def begin(self, content_type: bytes, extra: Sequence[Header] = ()) -> None:
        """Does nothing: the first event tells the status."""

    async def piece(self, data: bytes) -> None:
        """Hands events on."""
        for event in self._splitter.feed(data):
            payload = event_data(event)
            if payload is None:
                continue  # a comment: gRPC keeps its connections alive by itself
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
