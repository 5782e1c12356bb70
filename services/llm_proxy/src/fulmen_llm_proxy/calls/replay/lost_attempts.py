"""Reads the captured calls of lost attempts from the store."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Final

from google.protobuf.message import DecodeError
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from fulmen.errors import Unavailable
from fulmen.ids import attempt_of, parse_attempt_name, rollout_name
from fulmen.model_call import ModelCallInvalid
from fulmen.rpc.channel import FulmenChannel
from fulmen.store.v1 import span_service_pb2, span_service_pb2_grpc
from fulmen.store.v1.span_pb2 import SpanRecord
from fulmen.trajectories.reading import records_of
from fulmen_llm_proxy.attempts.caller import Attribution
from fulmen_llm_proxy.calls.replay.captured_calls import CallSequence, captured_attempt
from fulmen_llm_proxy.capture.settlement import CaptureSettlement

READ_S: Final = 15.0
"""Time for reading, seconds: the first call of an attempt that continues another one waits for it."""
SETTLE_S: Final = 5.0
"""The part of it in which captures of the lost attempts are waited for, which another proxy still has."""
MAX_ATTEMPTS: Final = 16
"""The latest lost attempts that are read."""
_PAUSE_S: Final = 0.2

_Records = dict[str, list[tuple[SpanRecord, Span]]]


class LostAttempts:
    """Reads what attempts continue."""

    def __init__(self, *, channel: FulmenChannel, settlement: CaptureSettlement, max_bytes: int) -> None:
        """Sets the store.

        Args:
            settlement: waits until the store has the captures of lost attempts.
            max_bytes: most bytes that are read for one attempt; what comes after them is not replayed.
        """
        self._stub = span_service_pb2_grpc.SpanServiceStub(channel)
        self._settlement = settlement
        self._max_bytes = max_bytes

    async def read(self, attribution: Attribution) -> CallSequence:
        """Returns the calls that an attempt may repeat: those of the latest lost attempt that sampled some.

        An attempt that was lost while it repeated calls has sampled none: its own predecessor has them all.

        Raises:
            FulmenError: if the store does not answer in time.
        """
        own = parse_attempt_name(attribution.attempt)
        rollout = rollout_name(own.project, own.rollout_id)
        first = max(attribution.terms.continues, own.number - MAX_ATTEMPTS)
        lost = [attempt_of(rollout, number) for number in range(own.number - 1, first - 1, -1)]
        try:
            async with asyncio.timeout(READ_S):
                await self._settled(lost)
                records = await self._stream([attribution.attempt, *lost])
        except TimeoutError:
            raise Unavailable("The store did not return the calls of a lost attempt in time.") from None
        given = captured_attempt(records[attribution.attempt]).replayed
        for name in lost:
            attempt = captured_attempt(records[name])
            if attempt.has_sampled:
                # Another process, or this one before a restart, may have given some of them.
                return CallSequence([call for call in attempt.calls if call.span_id not in given])
        return CallSequence([])

    async def _settled(self, lost: list[str]) -> None:
        try:
            async with asyncio.timeout(SETTLE_S):
                await self._settlement.settled(lost, {})
        except TimeoutError:
            return  # what the store has by now is replayed

    async def _stream(self, attempts: list[str]) -> _Records:
        while True:
            try:
                return await self._streamed(attempts)
            except Unavailable:
                await asyncio.sleep(_PAUSE_S)

    async def _streamed(self, attempts: list[str]) -> _Records:
        request = span_service_pb2.StreamSpansRequest(
            parents=attempts, filter=span_service_pb2.SpanFilter(model_calls_only=True)
        )
        records: _Records = defaultdict(list)
        left_bytes = self._max_bytes
        async for message in self._stub.StreamSpans(request, timeout=READ_S):
            for chunk in message.chunks:
                try:
                    found = list(records_of(chunk))
                except (ModelCallInvalid, DecodeError):
                    continue
                left_bytes -= sum(len(record.model_call) for record, _ in found)
                if left_bytes < 0:
                    return records
                records[chunk.attempt] += found
        return records
