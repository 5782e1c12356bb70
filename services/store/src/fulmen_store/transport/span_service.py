"""`SpanService` and the OpenTelemetry `TraceService` over gRPC.

Invariant: a reader holds a few MiB of chunks and one page of spans at a time, whatever the total size.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from uuid import UUID

import grpc.aio
import structlog
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

from fulmen.errors import Draining, PermissionDenied, RolloutNotFound
from fulmen.ids import attempt_name, attempt_of, parse_attempt_name, parse_rollout_name, rollout_name
from fulmen.store.v1 import span_pb2, span_service_pb2_grpc
from fulmen.store.v1 import span_service_pb2 as pb
from fulmen_service_kit.rpc.message_sizes import ANSWER_BYTES, messages_of_stream
from fulmen_service_kit.security.auth import current_caller
from fulmen_service_kit.security.tokens import Role
from fulmen_store.malformed import malformed
from fulmen_store.metrics import StoreMetrics
from fulmen_store.rollouts.feed_cursor import Cursor
from fulmen_store.rollouts.table import RolloutTable
from fulmen_store.spans.chunks import MAX_PAYLOAD_BYTES, Chunk, NewChunk
from fulmen_store.spans.following import SpanFollower
from fulmen_store.spans.span_filter import SpanFilter
from fulmen_store.spans.spans import Spans
from fulmen_store.spans.table import UNKNOWN_ROLLOUT, ChunkHead, SpanParent, SpanTable
from fulmen_store.transport.access import is_own_attempt, require_count, run_project
from fulmen_store.transport.in_order import answered_in_order
from fulmen_store.transport.otlp.ingest import OtlpIngest
from fulmen_store.transport.page_tokens import decode_token, encode_token, page_size
from fulmen_store.transport.wire.spans import (
    ChunkUnreadable,
    Listing,
    chunk_message,
    content_problem,
    filtered_chunks,
    read_chunk,
    read_filter,
)
from fulmen_store.transport.wire.watched_spans import watched_spans

__all__ = ["SpanService", "add_trace_service"]

MAX_CHUNKS = 512
MAX_PARENTS = 4096
MAX_LISTED = 100
PARENTS_PER_READ = 16
COMMITS_IN_FLIGHT = 8
MAX_CHUNK_ID = 64
DEFAULT_PAGE = 100
# Some hundred spans: a page that shows ten thousand begins with these.
FIRST_BYTES = 64 * 1024
PARENT_BYTES = 2
SPAN_KEY_BYTES = 20
KEY_BYTES = PARENT_BYTES + SPAN_KEY_BYTES
# Sorts before every span.
NO_SPAN = bytes(SPAN_KEY_BYTES)
TRACE_SERVICE = "opentelemetry.proto.collector.trace.v1.TraceService"
MAY_RECORD_MODEL_CALLS = frozenset({Role.SERVICE, Role.ADMIN})

_CHUNKS = frozenset({pb.WATCHED_FORM_UNSPECIFIED, pb.WATCHED_FORM_CHUNKS})
_Send = Callable[[Sequence[ChunkHead]], AsyncIterator[pb.WatchSpansResponse]]

_log = structlog.get_logger()


class SpanService(span_service_pb2_grpc.SpanServiceServicer):
    """Serves chunks of spans."""

    def __init__(
        self,
        *,
        spans: Spans,
        table: SpanTable,
        follower: SpanFollower,
        rollouts: RolloutTable,
        metrics: StoreMetrics,
        stopping: asyncio.Event,
    ) -> None:
        """Creates the servicer; `stopping` is set when the replica shuts down."""
        self._spans = spans
        self._table = table
        self._follower = follower
        self._rollouts = rollouts
        self._metrics = metrics
        self._stopping = stopping

    async def AppendSpans(
        self, request_iterator: AsyncIterator[pb.AppendSpansRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.AppendSpansResponse]:
        """Stores chunks; responds to each message after its commit, in order."""
        async for answer in answered_in_order(request_iterator, self._append, in_flight=COMMITS_IN_FLIGHT):
            yield answer

    async def ListSpans(self, request: pb.ListSpansRequest, context: grpc.aio.ServicerContext) -> pb.ListSpansResponse:
        """Lists the spans of rollouts and attempts, parent by parent."""
        names = [*([request.parent] if request.parent else []), *request.parents]
        require_count(names, field="parents", maximum=MAX_LISTED)
        parents = [_parent(name) for name in names]
        await self._require_parents(parents)
        wanted = read_filter(request.filter)
        limit = page_size(request.page_size, default=DEFAULT_PAGE)
        listed = "spans/" + "/".join([*names, request.filter.SerializeToString(deterministic=True).hex()])
        position, after = _position(decode_token(request.page_token, listed=listed, key_bytes=KEY_BYTES))
        response = pb.ListSpansResponse()
        while position < len(parents):
            left = limit - len(response.spans)
            # Request one extra span to find out whether there is another page.
            parent, max_bytes = parents[position], ANSWER_BYTES - response.ByteSize()
            listing = Listing(parent.project, after=after, limit=left + 1, max_bytes=max_bytes, wanted=wanted)
            await self._list(parent, listing, wanted=wanted)
            spans = listing.spans()
            if response.spans and spans and spans[0].size_bytes > max_bytes:
                # A listing has one span at least, which is for the next page.
                key = NO_SPAN if after is None else after
                response.next_page_token = encode_token(position.to_bytes(PARENT_BYTES) + key, listed=listed)
                break
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
        """Streams the chunks of many rollouts, unchanged or filtered."""
        wanted = read_filter(request.filter)

        async def chunks() -> AsyncIterator[span_pb2.SpanChunk]:
            async for parents in self._streamed_parents(request):
                found = await self._table.heads(parents)
                for together in _read_together(parents, found):
                    heads = [head for _, of_parent in together for head in of_parent]
                    async for chunk in self._chunks([parent for parent, _ in together], heads, wanted):
                        yield chunk

        async for part in messages_of_stream(chunks()):
            yield pb.StreamSpansResponse(chunks=part)

    async def WatchSpans(
        self, request: pb.WatchSpansRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.WatchSpansResponse]:
        """Streams the chunks of a rollout or attempt as they are stored, until it is over."""
        parent = _parent(request.parent)
        await self._require_parents([parent])
        wanted = read_filter(request.filter)
        since = Cursor.decode(request.cursor, parent).xid
        send = self._new_chunks(parent, wanted) if request.form in _CHUNKS else self._new_spans(parent, wanted, request)
        async for followed in self._follower.follow(parent, since=since, stopping=self._stopping.is_set):
            cursor = Cursor(xid=followed.settled).encode(parent)
            # The last message of those that belong together has the cursor: one is held back.
            held = pb.WatchSpansResponse()
            async for message in send(followed.heads):
                if held.chunks or held.spans:
                    yield held
                held = message
            held.cursor = cursor
            yield held
        if self._stopping.is_set():
            raise Draining("The store is shutting down: open the stream again.")

    def _new_chunks(self, parent: SpanParent, wanted: SpanFilter | None) -> _Send:
        seen: dict[UUID, set[tuple[int, bytes]]] = {}

        async def send(heads: Sequence[ChunkHead]) -> AsyncIterator[pb.WatchSpansResponse]:
            async for part in messages_of_stream(self._chunks([parent], heads, wanted, seen=seen)):
                yield pb.WatchSpansResponse(chunks=part)

        return send

    def _new_spans(self, parent: SpanParent, wanted: SpanFilter | None, request: pb.WatchSpansRequest) -> _Send:
        seen: set[tuple[int, bytes]] = set()
        in_outline = request.form == pb.WATCHED_FORM_OUTLINES

        async def spans(heads: Sequence[ChunkHead]) -> AsyncIterator[pb.AttemptSpan]:
            async for chunk in self._table.read(heads if wanted is None else _possible(heads, wanted)):
                try:
                    found, repeated = await asyncio.to_thread(
                        watched_spans, chunk, parent.project, wanted, seen, in_outline=in_outline
                    )
                except ChunkUnreadable:
                    self._skip(parent, chunk)
                    continue
                self._metrics.spans_repeated(repeated)
                for span in found:
                    yield span

        async def send(heads: Sequence[ChunkHead]) -> AsyncIterator[pb.WatchSpansResponse]:
            async for part in messages_of_stream(spans(heads), first_bytes=FIRST_BYTES):
                yield pb.WatchSpansResponse(spans=part)

        return send

    async def _streamed_parents(self, request: pb.StreamSpansRequest) -> AsyncIterator[list[SpanParent]]:
        """Yields the parents that the caller may access, in small batches."""
        if not request.training_run:
            require_count(request.parents, field="parents", maximum=MAX_PARENTS)
            parents = [_parent(name) for name in request.parents]
            for parent in parents:
                _require_own(parent)
            may_access = current_caller().may_access
            parents = [parent for parent in parents if may_access(parent.project)]
            for start in range(0, len(parents), PARENTS_PER_READ):
                yield parents[start : start + PARENTS_PER_READ]
            return
        if request.parents:
            raise malformed("parents", "must be empty with training_run")
        if current_caller().role is Role.ATTEMPT:
            raise PermissionDenied("An attempt key reads its own attempt only.", training_run=request.training_run)
        project = run_project(request.project, request.training_run)
        project_id = await self._rollouts.project_id(project)
        run_id = await self._rollouts.find_run(project_id, request.training_run)
        async for ids in self._table.rollouts_of_run(project_id, run_id):
            for start in range(0, len(ids), PARENTS_PER_READ):
                page = ids[start : start + PARENTS_PER_READ]
                yield [SpanParent(project=project, rollout_id=rollout_id) for rollout_id in page]

    async def _chunks(
        self,
        parents: Sequence[SpanParent],
        heads: Sequence[ChunkHead],
        wanted: SpanFilter | None,
        *,
        seen: dict[UUID, set[tuple[int, bytes]]] | None = None,
    ) -> AsyncIterator[span_pb2.SpanChunk]:
        """Yields chunks of parents, or their matching spans that are not among the `seen` ones of the rollout, and adds these."""
        by_rollout = {parent.rollout_id: parent for parent in parents}
        if wanted is None:
            async for chunk in self._table.read(heads):
                parent = by_rollout[chunk.rollout_id]
                if len(chunk.payload) > MAX_PAYLOAD_BYTES:
                    self._skip(parent, chunk)
                    continue
                yield chunk_message(chunk, parent.project)
            return
        seen = {} if seen is None else seen
        async for chunk in self._table.read(_possible(heads, wanted)):
            parent, known = by_rollout[chunk.rollout_id], seen.setdefault(chunk.rollout_id, set())
            try:
                messages, duplicates = await asyncio.to_thread(filtered_chunks, chunk, parent.project, wanted, known)
            except ChunkUnreadable:
                self._skip(parent, chunk)
                continue
            self._metrics.spans_repeated(duplicates)
            for message in messages:
                yield message

    async def _list(self, parent: SpanParent, listing: Listing, *, wanted: SpanFilter | None) -> None:
        (heads,) = await self._table.heads([parent])
        async for chunk in self._table.read(heads if wanted is None else _possible(heads, wanted)):
            try:
                await asyncio.to_thread(listing.add, chunk)
            except ChunkUnreadable:
                self._skip(parent, chunk)
        self._metrics.spans_repeated(listing.duplicates)

    def _skip(self, parent: SpanParent, chunk: Chunk) -> None:
        """Records a chunk that cannot be decoded; chunks of services are stored without decoding."""
        self._metrics.chunk_unreadable()
        attempt = attempt_name(parent.project, chunk.rollout_id, chunk.attempt)
        _log.warning("chunk_unreadable", attempt=attempt, chunk_id=str(chunk.chunk_id))

    async def _require_parents(self, parents: Sequence[SpanParent]) -> None:
        """Checks that the rollouts exist and that the caller may read them."""
        for parent in parents:
            _require_own(parent)
        may_access = current_caller().may_access
        numbers = await self._rollouts.projects.find_all(parent.project for parent in parents)
        stored = await self._rollouts.stored([parent.rollout_id for parent in parents])
        for parent in parents:
            found = stored.get(parent.rollout_id)
            if found is None or found[0] != numbers[parent.project] or not may_access(parent.project):
                name = rollout_name(parent.project, parent.rollout_id)
                raise RolloutNotFound("The rollout does not exist.", rollout=name)

    async def _append(self, request: pb.AppendSpansRequest) -> pb.AppendSpansResponse:
        require_count(request.chunks, field="chunks", maximum=MAX_CHUNKS)
        response = pb.AppendSpansResponse()
        good: list[NewChunk] = []
        caller = current_caller()
        may_access, by_agent = caller.may_access, caller.role is Role.ATTEMPT
        for message in request.chunks:
            chunk = read_chunk(message)
            problem = chunk if isinstance(chunk, str) else _write_problem(chunk)
            if problem or isinstance(chunk, str):
                response.rejected.add(chunk_id=message.chunk_id[:MAX_CHUNK_ID], message=problem)
            elif not may_access(chunk.project):
                response.rejected.add(chunk_id=str(chunk.chunk.chunk_id), message=UNKNOWN_ROLLOUT)
            else:
                good.append(replace(chunk, by_agent=True) if by_agent else chunk)
        problems = await self._spans.append(good)
        response.accepted_count = problems.count("")
        for chunk, problem in zip(good, problems, strict=True):
            if problem:
                response.rejected.add(chunk_id=str(chunk.chunk.chunk_id), message=problem)
        return response


def add_trace_service(ingest: OtlpIngest, server: grpc.aio.Server) -> None:
    """Serves the standard OTLP/gRPC trace endpoint for any OpenTelemetry SDK.

    Exports are received as bytes, because `OtlpIngest` splits bytes.
    """

    async def export(body: bytes, context: grpc.aio.ServicerContext) -> trace_service_pb2.ExportTraceServiceResponse:
        return await ingest.export(body)

    handler = grpc.unary_unary_rpc_method_handler(
        export, response_serializer=trace_service_pb2.ExportTraceServiceResponse.SerializeToString
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(TRACE_SERVICE, {"Export": handler}),))


def _write_problem(new: NewChunk) -> str:
    if not is_own_attempt(new.project, new.chunk.rollout_id, new.chunk.attempt):
        return "an attempt key can only write spans of its own attempt"
    caller = current_caller()
    return "" if caller.role in MAY_RECORD_MODEL_CALLS else content_problem(new.chunk, own=caller.attempt)


def _read_together(
    parents: Sequence[SpanParent], found: Sequence[Sequence[ChunkHead]]
) -> list[list[tuple[SpanParent, Sequence[ChunkHead]]]]:
    """Groups parents that follow each other: spans of neighbours are side by side in a segment. No two of a group are of one rollout."""
    groups: list[list[tuple[SpanParent, Sequence[ChunkHead]]]] = []
    rollouts: set[UUID] = set()
    for parent, heads in zip(parents, found, strict=True):
        if not groups or parent.rollout_id in rollouts:
            groups.append([])
            rollouts.clear()
        groups[-1].append((parent, heads))
        rollouts.add(parent.rollout_id)
    return groups


def _possible(heads: Sequence[ChunkHead], wanted: SpanFilter) -> list[ChunkHead]:
    """Returns the chunks whose time range may contain matching spans."""
    return [head for head in heads if wanted.may_match_chunk(start_ns=head.start_ns, end_ns=head.end_ns)]


def _position(key: bytes | None) -> tuple[int, bytes | None]:
    """Decodes a page token's key into the parent and the span after which the page starts."""
    if key is None:
        return 0, None
    position, after = int.from_bytes(key[:PARENT_BYTES]), key[PARENT_BYTES:]
    return position, None if after == NO_SPAN else after


def _parent(name: str) -> SpanParent:
    if "/attempts/" in name:
        attempt = parse_attempt_name(name, field="parent")
        return SpanParent(project=attempt.project, rollout_id=attempt.rollout_id, number=attempt.number)
    rollout = parse_rollout_name(name, field="parent")
    return SpanParent(project=rollout.project, rollout_id=rollout.rollout_id)


def _require_own(parent: SpanParent) -> None:
    if not is_own_attempt(parent.project, parent.rollout_id, parent.number):
        rollout = rollout_name(parent.project, parent.rollout_id)
        raise PermissionDenied(
            "An attempt key reads its own attempt only.",
            parent=attempt_of(rollout, parent.number) if parent.number else rollout,
        )
