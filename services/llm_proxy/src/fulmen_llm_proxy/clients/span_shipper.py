"""Delivers captures to the store: the background role between the queue and SpanService.

Invariant: a call leaves the queue's account only when the store has acknowledged its chunk or has
refused it for good. A chunk is sent with the same id until then, and the store drops repeats, so
that a broken connection neither loses a call nor doubles it.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass

import structlog

from fulmen.errors import ArgumentInvalid, FulmenError, MessageTooLarge, Unavailable
from fulmen.rpc.channel import DuplexStream, FulmenChannel
from fulmen.store.v1 import span_pb2, span_service_pb2, span_service_pb2_grpc
from fulmen_llm_proxy.clients.span_codec import MAX_PAYLOAD_BYTES, EncodedCall, SpanCodec
from fulmen_llm_proxy.domain.call import FinishedCall
from fulmen_llm_proxy.domain.capture_queue import CaptureQueue
from fulmen_llm_proxy.domain.ledger import AttemptLedger
from fulmen_llm_proxy.domain.retry import RetryPolicy
from fulmen_llm_proxy.metrics import Metrics

_MAX_CALLS = 256
_MAX_BATCH_BYTES = MAX_PAYLOAD_BYTES - 256 * 1024
"""Room for the outlines of the spans, so that a batch of one attempt stays within one chunk."""
_ACK_TIMEOUT_S = 30.0
_LINGER_S = 0.01
"""How long calls are gathered before they go: one request of many costs little more than one of one."""

_log = structlog.get_logger(__name__)

_Stream = DuplexStream[span_service_pb2.AppendSpansRequest, span_service_pb2.AppendSpansResponse]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parcel:
    """One request to the store, and the calls in it by chunk id."""

    request: span_service_pb2.AppendSpansRequest
    calls: dict[str, list[EncodedCall]]


class SpanShipper:
    """Sends what the queue holds, in order, one acknowledged request after the other."""

    def __init__(
        self,
        *,
        channel: FulmenChannel,
        queue: CaptureQueue,
        ledger: AttemptLedger,
        codec: SpanCodec,
        retry: RetryPolicy,
        metrics: Metrics,
    ) -> None:
        self._stub = span_service_pb2_grpc.SpanServiceStub(channel)
        self._queue = queue
        self._ledger = ledger
        self._codec = codec
        self._retry = retry
        self._metrics = metrics
        self._stream: _Stream | None = None
        metrics.capture_bytes.set_function(lambda: queue.size_bytes)

    async def run(self) -> None:
        """Delivers until it is cancelled; what waits by then is lost with the process."""
        try:
            while True:
                await self._queue.filled()
                await asyncio.sleep(_LINGER_S)
                calls = self._queue.take(max_calls=_MAX_CALLS, max_bytes=_MAX_BATCH_BYTES)
                await self._deliver(calls)
                self._queue.release(calls)
        finally:
            self._drop_stream()

    async def _deliver(self, calls: list[FinishedCall]) -> None:
        parcel = self._pack(calls)
        answer = await self._send_until_acknowledged(parcel.request)
        rejected = {chunk.chunk_id: chunk.message for chunk in answer.rejected}
        for chunk_id, encoded in parcel.calls.items():
            message = rejected.get(chunk_id)
            if message is not None:
                self._metrics.rejected.inc(len(encoded))
                _log.error("captures_rejected", attempt=encoded[0].attempt, calls=len(encoded), reason=message)
            for call in encoded:
                self._account(call, kept=message is None)

    def _account(self, call: EncodedCall, *, kept: bool) -> None:
        usable = call.usable and kept
        if call.captured:
            self._metrics.captured.labels("yes" if usable else "no").inc()
        self._ledger.delivered(
            call.attempt,
            usable=usable,
            prompt_tokens=call.prompt_tokens,
            completion_tokens=call.completion_tokens,
        )

    def _pack(self, calls: list[FinishedCall]) -> _Parcel:
        chunks: list[span_pb2.SpanChunk] = []
        by_chunk: dict[str, list[EncodedCall]] = {}
        grouped = self._codec.chunks([self._codec.encode(call) for call in calls])
        for attempt, encoded in grouped.items():
            chunk = self._codec.chunk(attempt, encoded)
            chunks.append(chunk)
            by_chunk[chunk.chunk_id] = encoded
        return _Parcel(request=span_service_pb2.AppendSpansRequest(chunks=chunks), calls=by_chunk)

    async def _send_until_acknowledged(
        self, request: span_service_pb2.AppendSpansRequest
    ) -> span_service_pb2.AppendSpansResponse:
        delays = self._retry.delays(random.random)
        while True:
            try:
                return await self._send(request)
            except (ArgumentInvalid, MessageTooLarge) as error:
                # Sending it again would end the same way, and hold up everything behind it.
                self._drop_stream()
                return _all_rejected(request, str(error))
            except FulmenError as error:
                self._drop_stream()
                delay_s = next(delays)
                _log.warning("captures_wait_for_store", reason=error.reason, retry_in_s=round(delay_s, 3))
            await asyncio.sleep(delay_s)

    async def _send(self, request: span_service_pb2.AppendSpansRequest) -> span_service_pb2.AppendSpansResponse:
        if self._stream is None:
            self._stream = self._stub.AppendSpans()
        try:
            async with asyncio.timeout(_ACK_TIMEOUT_S):
                await self._stream.write(request)
                answer = await self._stream.read()
        except TimeoutError:
            raise Unavailable("The store did not acknowledge spans in time.") from None
        if not isinstance(answer, span_service_pb2.AppendSpansResponse):
            raise Unavailable("The store closed the stream.")
        return answer

    def _drop_stream(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.cancel()


def _all_rejected(request: span_service_pb2.AppendSpansRequest, message: str) -> span_service_pb2.AppendSpansResponse:
    rejected = [span_service_pb2.RejectedChunk(chunk_id=chunk.chunk_id, message=message) for chunk in request.chunks]
    return span_service_pb2.AppendSpansResponse(rejected=rejected)
