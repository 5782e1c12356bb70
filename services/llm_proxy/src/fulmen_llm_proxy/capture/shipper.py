"""The way of captures to the store: packs calls into chunks and sends them over one stream."""

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
"""The store takes 512 chunks and 4 MiB in one message."""

_Stream = DuplexStream[span_service_pb2.AppendSpansRequest, span_service_pb2.AppendSpansResponse]


class SpanShipper:
    """Sends chunks to SpanService; one request is under way at a time."""

    def __init__(self, *, channel: FulmenChannel, codec: SpanCodec) -> None:
        self._stub = span_service_pb2_grpc.SpanServiceStub(channel)
        self._codec = codec
        self._stream: _Stream | None = None

    def pack(self, calls: list[FinishedCall]) -> list[PackedCalls]:
        """Packs calls into chunks with their final ids."""
        return self._codec.pack([self._codec.encode(call) for call in calls])

    async def send(self, packed: list[PackedCalls]) -> Mapping[str, str]:
        """Sends chunks once; returns why the store refused some for good, by chunk id.

        Raises:
            FulmenError: if the store did not acknowledge them.
        """
        rejected: dict[str, str] = {}
        for part in _requests(packed):
            try:
                chunks = [span_pb2.SpanChunk.FromString(one.chunk) for one in part]
                answer = await self._append(span_service_pb2.AppendSpansRequest(chunks=chunks))
            except (ArgumentInvalid, MessageTooLarge) as error:
                # Sending it again would end the same way, and hold up everything behind it.
                self.close()
                rejected |= {one.chunk_id: str(error) for one in part}
            except BaseException:
                # Also when it is cancelled: an answer may still come, and would be taken for the next request's.
                self.close()
                raise
            else:
                rejected |= {chunk.chunk_id: chunk.message for chunk in answer.rejected}
        return rejected

    def close(self) -> None:
        """Drops the stream; the next request opens another."""
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
    """Yields what fits into one message each, in order."""
    part: list[PackedCalls] = []
    size_bytes = 0
    for one in packed:
        if part and (size_bytes + len(one.chunk) > _MAX_REQUEST_BYTES or len(part) == _MAX_REQUEST_CHUNKS):
            yield part
            part, size_bytes = [], 0
        part.append(one)
        size_bytes += len(one.chunk)
    if part:
        yield part
