"""`SpanService` and the OpenTelemetry `TraceService` over gRPC.

Invariant: a reader holds a few MiB of chunks and one page of spans at a time, however much there is.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from functools import partial
from uuid import UUID

import grpc.aio
import structlog
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

from fulmen.errors import PermissionDenied, RolloutNotFound
from fulmen.ids import attempt_name, parse_attempt_name, parse_rollout_name, rollout_name
from fulmen.store.v1 import span_pb2, span_service_pb2_grpc
from fulmen.store.v1 import span_service_pb2 as pb
from fulmen_service_kit.auth import current_caller
from fulmen_service_kit.tokens import Role
from fulmen_store.malformed import malformed
from fulmen_store.metrics import StoreMetrics
from fulmen_store.rollouts.table import RolloutTable
from fulmen_store.spans.chunks import Chunk, NewChunk
from fulmen_store.spans.span_filter import SpanFilter
from fulmen_store.spans.spans import Spans
from fulmen_store.spans.table import ChunkHead, SpanTable
from fulmen_store.transport.access import is_own_attempt, project_limit, require_count, require_project
from fulmen_store.transport.in_order import answered_in_order
from fulmen_store.transport.otlp_ingest import OtlpIngest
from fulmen_store.transport.page_tokens import decode_token, encode_token, page_size
from fulmen_store.transport.span_codec import (
    ChunkUnreadable,
    Listing,
    chunk_message,
    filtered_chunk,
    model_call_problem,
    read_chunk,
    read_filter,
)

__all__ = ["SpanService", "add_trace_service"]

MAX_CHUNKS = 512
MAX_PARENTS = 4096
MAX_LISTED = 100
PARENTS_PER_READ = 16
COMMITS_IN_FLIGHT = 8
MESSAGE_BYTES = 1024 * 1024
PAGE_BYTES = 4 * 1024 * 1024
DEFAULT_PAGE = 100
PARENT_BYTES = 2
SPAN_KEY_BYTES = 20
KEY_BYTES = PARENT_BYTES + SPAN_KEY_BYTES
# Sorts before every span.
NO_SPAN = bytes(SPAN_KEY_BYTES)
TRACE_SERVICE = "opentelemetry.proto.collector.trace.v1.TraceService"
MAY_RECORD_MODEL_CALLS = frozenset({Role.SERVICE, Role.ADMIN})

_log = structlog.get_logger()


class SpanService(span_service_pb2_grpc.SpanServiceServicer):
    """Serves chunks of spans."""

    def __init__(self, *, spans: Spans, table: SpanTable, rollouts: RolloutTable, metrics: StoreMetrics) -> None:
        self._spans = spans
        self._table = table
        self._rollouts = rollouts
        self._metrics = metrics

    async def AppendSpans(
        self, request_iterator: AsyncIterator[pb.AppendSpansRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.AppendSpansResponse]:
        """Stores chunks; answers each message after its commit, in order."""
        append = partial(self._append, project_id=await self._project_limit())
        async for answer in answered_in_order(request_iterator, append, in_flight=COMMITS_IN_FLIGHT):
            yield answer

    async def ListSpans(self, request: pb.ListSpansRequest, context: grpc.aio.ServicerContext) -> pb.ListSpansResponse:
        """Lists the spans of rollouts and attempts, one parent after the other."""
        names = [*([request.parent] if request.parent else []), *request.parents]
        require_count(names, field="parents", maximum=MAX_LISTED)
        parents = [_parent(name) for name in names]
        project_id = await self._require_parents(parents)
        wanted = read_filter(request.filter)
        limit = page_size(request.page_size, default=DEFAULT_PAGE)
        listed = "spans/" + "/".join([*names, request.filter.SerializeToString(deterministic=True).hex()])
        position, after = _place(decode_token(request.page_token, listed=listed, key_bytes=KEY_BYTES))
        response = pb.ListSpansResponse()
        while position < len(parents):
            left = limit - len(response.spans)
            # One more than asked for, to know whether there is another page.
            listing = Listing(after=after, limit=left + 1, max_bytes=PAGE_BYTES - response.ByteSize(), wanted=wanted)
            await self._list(parents[position], listing, project_id=project_id, wanted=wanted)
            spans = listing.spans()
            response.spans.extend(pb.AttemptSpan(attempt=str(span.attempt), span=span.record) for span in spans[:left])
            if listing.is_cut or len(spans) > left:
                key = spans[:left][-1].key if left else NO_SPAN
                response.next_page_token = encode_token(position.to_bytes(PARENT_BYTES) + key, listed=listed)
                break
            position, after = position + 1, None
        return response

    async def StreamSpans(
        self, request: pb.StreamSpansRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.StreamSpansResponse]:
        """Streams the chunks of many rollouts as they were written, or filtered."""
        wanted = read_filter(request.filter)
        message, size_bytes = pb.StreamSpansResponse(), 0
        async for parents, project_id in self._streamed_parents(request):
            for heads in await self._table.heads(parents, project_id=project_id):
                async for chunk in self._chunks(heads, wanted):
                    if message.chunks and size_bytes + len(chunk.payload) > MESSAGE_BYTES:
                        yield message
                        message, size_bytes = pb.StreamSpansResponse(), 0
                    message.chunks.append(chunk)
                    size_bytes += len(chunk.payload)
        if message.chunks:
            yield message

    async def _streamed_parents(
        self, request: pb.StreamSpansRequest
    ) -> AsyncIterator[tuple[list[tuple[UUID, int]], int | None]]:
        """Yields parents in small batches, each with the only project that they may belong to."""
        if not request.training_run:
            require_count(request.parents, field="parents", maximum=MAX_PARENTS)
            parents = [_parent(name) for name in request.parents]
            for rollout_id, number in parents:
                _require_own(rollout_id, number)
            project_id = await self._project_limit()
            for start in range(0, len(parents), PARENTS_PER_READ):
                yield parents[start : start + PARENTS_PER_READ], project_id
            return
        if request.parents:
            raise malformed("parents", "must be empty with training_run")
        if current_caller().role is Role.ATTEMPT:
            raise PermissionDenied("An attempt key reads its own attempt only.", training_run=request.training_run)
        project = await self._rollouts.project_id(require_project(request.project))
        run_id = await self._rollouts.find_run(project, request.training_run)
        async for ids in self._table.rollouts_of_run(project, run_id):
            for start in range(0, len(ids), PARENTS_PER_READ):
                yield [(rollout_id, 0) for rollout_id in ids[start : start + PARENTS_PER_READ]], project

    async def _chunks(self, heads: Sequence[ChunkHead], wanted: SpanFilter | None) -> AsyncIterator[span_pb2.SpanChunk]:
        if wanted is None:
            async for chunk in self._table.read(heads):
                yield chunk_message(chunk)
            return
        seen: set[tuple[int, bytes]] = set()
        async for chunk in self._table.read(_possible(heads, wanted)):
            try:
                message, duplicates = await asyncio.to_thread(filtered_chunk, chunk, wanted, seen)
            except ChunkUnreadable:
                self._skip(chunk)
                continue
            self._metrics.spans_repeated(duplicates)
            if message is not None:
                yield message

    async def _list(
        self, parent: tuple[UUID, int], listing: Listing, *, project_id: int | None, wanted: SpanFilter | None
    ) -> None:
        (heads,) = await self._table.heads([parent], project_id=project_id)
        async for chunk in self._table.read(heads if wanted is None else _possible(heads, wanted)):
            try:
                await asyncio.to_thread(listing.add, chunk)
            except ChunkUnreadable:
                self._skip(chunk)
        self._metrics.spans_repeated(listing.duplicates)

    def _skip(self, chunk: Chunk) -> None:
        """Records a chunk that cannot be decoded; chunks of services are stored unread."""
        self._metrics.chunk_unreadable()
        _log.warning(
            "chunk_unreadable", attempt=attempt_name(chunk.rollout_id, chunk.attempt), chunk_id=str(chunk.chunk_id)
        )

    async def _require_parents(self, parents: Sequence[tuple[UUID, int]]) -> int | None:
        """Checks that the caller may read rollouts, and that they exist; returns the project that it is bound to."""
        for rollout_id, number in parents:
            _require_own(rollout_id, number)
        project_id = await self._project_limit()
        stored = await self._rollouts.stored([rollout_id for rollout_id, _ in parents])
        for rollout_id, _ in parents:
            if rollout_id not in stored or project_id not in (None, stored[rollout_id][0]):
                raise RolloutNotFound("The rollout does not exist.", rollout=rollout_name(rollout_id))
        return project_id

    async def _append(self, request: pb.AppendSpansRequest, *, project_id: int | None) -> pb.AppendSpansResponse:
        require_count(request.chunks, field="chunks", maximum=MAX_CHUNKS)
        response = pb.AppendSpansResponse()
        good: list[Chunk] = []
        for message in request.chunks:
            chunk = read_chunk(message)
            problem = chunk if isinstance(chunk, str) else _write_problem(chunk)
            if problem or isinstance(chunk, str):
                response.rejected.add(chunk_id=message.chunk_id, message=problem)
            else:
                good.append(chunk)
        kept = await self._spans.append([NewChunk(chunk=chunk, project_id=project_id) for chunk in good])
        response.accepted_count = sum(kept)
        for chunk, is_kept in zip(good, kept, strict=True):
            if not is_kept:
                response.rejected.add(chunk_id=str(chunk.chunk_id), message="the rollout does not exist")
        return response

    async def _project_limit(self) -> int | None:
        limit = project_limit()
        return None if limit is None else await self._rollouts.project_id(limit)


def add_trace_service(ingest: OtlpIngest, server: grpc.aio.Server) -> None:
    """Serves the standard OTLP/gRPC trace endpoint: any OpenTelemetry SDK is a writer.

    Exports are taken as bytes, since they are taken apart as bytes.
    """

    async def export(body: bytes, context: grpc.aio.ServicerContext) -> trace_service_pb2.ExportTraceServiceResponse:
        return await ingest.export(body)

    handler = grpc.unary_unary_rpc_method_handler(
        export, response_serializer=trace_service_pb2.ExportTraceServiceResponse.SerializeToString
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(TRACE_SERVICE, {"Export": handler}),))


def _write_problem(chunk: Chunk) -> str:
    if not is_own_attempt(chunk.rollout_id, chunk.attempt):
        return "an attempt key writes its own attempt only"
    return "" if current_caller().role in MAY_RECORD_MODEL_CALLS else model_call_problem(chunk)


def _possible(heads: Sequence[ChunkHead], wanted: SpanFilter) -> list[ChunkHead]:
    """Returns the chunks whose times do not exclude that something in them matches."""
    return [head for head in heads if wanted.may_match_chunk(start_ns=head.start_ns, end_ns=head.end_ns)]


def _place(key: bytes | None) -> tuple[int, bytes | None]:
    """Decodes a page token's key: the parent, and the span after which the page starts."""
    if key is None:
        return 0, None
    position, after = int.from_bytes(key[:PARENT_BYTES]), key[PARENT_BYTES:]
    return position, None if after == NO_SPAN else after


def _parent(name: str) -> tuple[UUID, int]:
    if "/attempts/" in name:
        attempt = parse_attempt_name(name, field="parent")
        return attempt.rollout_id, attempt.number
    return parse_rollout_name(name, field="parent"), 0


def _require_own(rollout_id: UUID, number: int) -> None:
    if not is_own_attempt(rollout_id, number):
        raise PermissionDenied(
            "An attempt key reads its own attempt only.",
            parent=attempt_name(rollout_id, number) if number else rollout_name(rollout_id),
        )
