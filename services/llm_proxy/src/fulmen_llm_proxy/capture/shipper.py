"""Packs captures into chunks and sends them to the store over one stream."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping

from fulmen.errors import ArgumentInvalid, MessageTooLarge, Unavailable
from fulmen.rpc.channel import DuplexStream, FulmenChannel
from fulmen.store.v1 import span_pb2, span_service_pb2, span_service_pb2_grpc
from fulmen_llm_proxy.capture.finished_call import FinishedCall
from fulmen_llm_proxy.capture.packed import PackedCalls
from fulmen_llm_proxy.capture.span_codec import SpanCodec

_ACK_TIMEOUT_S = 30.0
_MAX_REQUEST_BYTES = 3 * 1024 * 1024
_MAX_REQUEST_CHUNKS = 512
"""The store's limits of a message are 512 chunks and 4 MiB."""

_Stream = DuplexStream[span_service_pb2.AppendSpansRequest, span_service_pb2.AppendSpansResponse]


class SpanShipper:
    """Sends chunks to SpanService, one request at a time."""

    def __init__(self, *, channel: FulmenChannel, codec: SpanCodec) -> None:
        self._stub = span_service_pb2_grpc.SpanServiceStub(channel)
        self._codec = codec
        self._stream: _Stream | None = None

    def pack(self, calls: list[FinishedCall]) -> list[PackedCalls]:
        """Packs calls into chunks with their final ids."""
        return self._codec.pack([self._codec.encode(call) for call in calls])

    async def send(self, packed: list[PackedCalls]) -> Mapping[str, str]:
        """Sends chunks once; returns the reasons of permanent refusals by chunk id.

        Raises:
            FulmenError: if the store did not acknowledge them.
        """
        rejected: dict[str, str] = {}
        for batch in _requests(packed):
            try:
                chunks = [span_pb2.SpanChunk.FromString(packed_calls.chunk) for packed_calls in batch]
                answer = await self._append(span_service_pb2.AppendSpansRequest(chunks=chunks))
            except (ArgumentInvalid, MessageTooLarge) as error:
                # A retry would fail in the same way, and block everything behind it.
                self.close()
                rejected |= {packed_calls.chunk_id: str(error) for packed_calls in batch}
            except BaseException:
                # Also when cancelled: a late answer would be read as the next request's.
                self.close()
                raise
            else:
                rejected |= {chunk.chunk_id: chunk.message for chunk in answer.rejected}
        return rejected

    def close(self) -> None:
        """Closes the stream; the next request opens a new one."""
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.cancel()

    async def _append(self, request: span_service_pb2.AppendSpansRequest) -> span_service_pb2.AppendSpansResponse:
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


def _requests(packed: list[PackedCalls]) -> Iterator[list[PackedCalls]]:
    """Splits chunks into messages within the store's limits, in order."""
    batch: list[PackedCalls] = []
    size_bytes = 0
    for packed_calls in packed:
        if batch and (size_bytes + len(packed_calls.chunk) > _MAX_REQUEST_BYTES or len(batch) == _MAX_REQUEST_CHUNKS):
            yield batch
            batch, size_bytes = [], 0
        batch.append(packed_calls)
        size_bytes += len(packed_calls.chunk)
    if batch:
        yield batch
