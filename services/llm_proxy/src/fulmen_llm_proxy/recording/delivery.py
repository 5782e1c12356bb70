"""Delivers recorded calls to the store.

While the store does not answer, the calls in hand are sent again and again, and newer ones are dropped as soon as the
buffer is full: calls never wait for a recording.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import structlog

from fulmen.errors import ArgumentInvalid, FulmenError, MessageTooLarge, PermissionDenied, Unimplemented
from fulmen.rpc.channel import FulmenChannel
from fulmen.store.v1 import call_service_pb2 as pb
from fulmen.store.v1 import call_service_pb2_grpc
from fulmen_llm_proxy.recording.app_call import AppCall
from fulmen_llm_proxy.recording.buffer import RecordingBuffer
from fulmen_llm_proxy.recording.packing import NotRecorded, pack
from fulmen_llm_proxy.routing.retry import RetryPolicy

_LINGER_S: Final = 0.2
_MAX_CALLS: Final = 64
_MAX_REQUEST_BYTES: Final = 3 * 1024 * 1024
_DEADLINE_S: Final = 15.0
_MAX_TOLD: Final = 256
_REJECTED: Final = "rejected"

_log = structlog.get_logger(__name__)


class RecordingDelivery:
    """Background role: packs calls in a thread of its own, and sends them."""

    def __init__(self, *, buffer: RecordingBuffer, channel: FulmenChannel, retry: RetryPolicy) -> None:
        self._buffer = buffer
        self._stub = call_service_pb2_grpc.CallServiceStub(channel)
        self._retry = retry
        self._metrics = buffer.metrics
        # Logged once; the metrics count every case.
        self._told: set[tuple[str, str]] = set()

    async def run(self) -> None:
        """Delivers until cancelled; the remaining calls are lost then."""
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="recording") as thread:
            while True:
                await self._buffer.filled()
                if self._buffer.count < _MAX_CALLS:
                    await asyncio.sleep(_LINGER_S)
                calls = self._buffer.take(_MAX_CALLS)
                try:
                    packed = [await self._packed(thread, call) for call in calls]
                    for request in _requests([each for each in packed if each is not None]):
                        await self._send(request)
                finally:
                    self._buffer.release(calls)

    async def _packed(self, thread: ThreadPoolExecutor, call: AppCall) -> pb.NewCall | None:
        try:
            return await asyncio.get_running_loop().run_in_executor(thread, pack, call)
        except NotRecorded as error:
            self._metrics.dropped(str(error))
            if (told := (call.model, str(error))) not in self._told and len(self._told) < _MAX_TOLD:
                self._told.add(told)
                _log.warning("calls_not_recorded", model=call.model, reason=str(error))
            return None

    async def _send(self, request: pb.RecordCallsRequest) -> None:
        """Sends a request until the store acknowledges or refuses it."""
        delays = self._retry.delays(random.random)
        while True:
            try:
                answer = await self._stub.RecordCalls(request, timeout=_DEADLINE_S)
            except (ArgumentInvalid, MessageTooLarge, PermissionDenied, Unimplemented) as error:
                # A retry would fail in the same way.
                _log.error("recorded_calls_refused", calls=len(request.calls), reason=error.reason)
                self._metrics.dropped(_REJECTED, len(request.calls))
                return
            except FulmenError as error:
                delay_s = next(delays)
                _log.warning("recorded_calls_wait_for_store", reason=error.reason, retry_in_s=round(delay_s, 3))
                await asyncio.sleep(delay_s)
            else:
                self._metrics.dropped(_REJECTED, answer.rejected_count)
                self._metrics.delivered(len(request.calls) - answer.rejected_count)
                return


def _requests(calls: list[pb.NewCall]) -> Iterator[pb.RecordCallsRequest]:
    """Splits calls into requests within the store's limits, in order."""
    batch: list[pb.NewCall] = []
    size_bytes = 0
    for call in calls:
        own_bytes = call.ByteSize()
        if batch and size_bytes + own_bytes > _MAX_REQUEST_BYTES:
            yield pb.RecordCallsRequest(calls=batch)
            batch, size_bytes = [], 0
        batch.append(call)
        size_bytes += own_bytes
    if batch:
        yield pb.RecordCallsRequest(calls=batch)
