"""Reads the captured calls of lost attempts from the store."""

from __future__ import annotations

import asyncio
from typing import Final

from google.protobuf.message import DecodeError
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from fulmen.errors import Unavailable
from fulmen.ids import attempt_of, parse_attempt_name, rollout_name
from fulmen.model_call import ModelCallInvalid
from fulmen.rpc.channel import FulmenChannel
from fulmen.store.v1 import span_service_pb2, span_service_pb2_grpc
from fulmen.store.v1.span_pb2 import SpanChunk, SpanRecord
from fulmen.trajectories.reading import records_of
from fulmen_llm_proxy.attempts.caller import Attribution
from fulmen_llm_proxy.calls.replay.captured_calls import CallSequence, CapturedAttempt, captured_attempt
from fulmen_llm_proxy.capture.settlement import CaptureSettlement

READ_S: Final = 15.0
"""Time for reading, seconds: the first call of an attempt that continues another one waits for it."""
SETTLE_S: Final = 5.0
"""The part of it in which captures of the lost attempts are waited for, which another proxy still has."""
READERS: Final = 8
"""Attempts whose calls are read at a time; each may hold `max_bytes` meanwhile. The others wait, within their time for reading."""
_PAUSE_S: Final = 0.2

_Records = list[tuple[SpanRecord, Span]]


class LostAttempts:
    """Reads what attempts continue."""

    def __init__(self, *, channel: FulmenChannel, settlement: CaptureSettlement, max_bytes: int) -> None:
        """Sets the store.

        Args:
            settlement: waits until the store has the captures of lost attempts.
            max_bytes: maximum number of bytes that are read of one attempt; later calls are not replayed.
        """
        self._stub = span_service_pb2_grpc.SpanServiceStub(channel)
        self._settlement = settlement
        self._max_bytes = max_bytes
        self._readers = asyncio.Semaphore(READERS)

    async def read(self, attribution: Attribution) -> CallSequence:
        """Returns the calls that an attempt may repeat: the calls of the latest lost attempt that sampled any.

        An attempt that was lost while it repeated calls has sampled none: its own predecessor has them all.

        Raises:
            FulmenError: if the store does not answer in time.
        """
        own = parse_attempt_name(attribution.attempt)
        rollout = rollout_name(own.project, own.rollout_id)
        numbers = range(own.number - 1, attribution.terms.continues - 1, -1)
        try:
            async with asyncio.timeout(READ_S), self._readers:
                return await self._read(attribution.attempt, [attempt_of(rollout, number) for number in numbers])
        except TimeoutError:
            raise Unavailable("The store did not return the calls of a lost attempt in time.") from None

    async def _read(self, own: str, lost: list[str]) -> CallSequence:
        await self._settled(lost)
        # Another process, or this one before a restart, may have given some of the calls.
        given = (await self._captured(own)).replayed
        for name in lost:
            attempt = await self._captured(name)
            if attempt.has_sampled:
                return CallSequence([call for call in attempt.calls if call.span_id not in given])
        return CallSequence([])

    async def _settled(self, lost: list[str]) -> None:
        try:
            async with asyncio.timeout(SETTLE_S):
                await self._settlement.settled(lost, {})
        except TimeoutError:
            return  # what the store has by now is replayed

    async def _captured(self, name: str) -> CapturedAttempt:
        # In a thread: a long attempt has megabytes of JSON, and the calls of others go on meanwhile.
        return await asyncio.to_thread(captured_attempt, await self._stream(name))

    async def _stream(self, attempt: str) -> _Records:
        while True:
            try:
                return await self._streamed(attempt)
            except Unavailable:
                await asyncio.sleep(_PAUSE_S)

    async def _streamed(self, attempt: str) -> _Records:
        request = span_service_pb2.StreamSpansRequest(
            parents=[attempt], filter=span_service_pb2.SpanFilter(model_calls_only=True)
        )
        records: _Records = []
        left_bytes = self._max_bytes
        async for message in self._stub.StreamSpans(request, timeout=READ_S):
            for chunk in message.chunks:
                found = await asyncio.to_thread(_records_in, chunk)
                left_bytes -= sum(len(record.model_call) for record, _ in found)
                if left_bytes < 0:
                    return records
                records += found
        return records


def _records_in(chunk: SpanChunk) -> _Records:
    """Returns the spans of a chunk; none if it cannot be read."""
    try:
        return list(records_of(chunk))
    except (ModelCallInvalid, DecodeError):
        return []
