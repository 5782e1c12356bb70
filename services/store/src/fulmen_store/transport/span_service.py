"""`SpanService` and the OpenTelemetry `TraceService` over gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from uuid import UUID

import grpc.aio
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from fulmen.errors import FulmenError, PermissionDenied, RolloutNotFound
from fulmen.ids import attempt_name, parse_attempt_name, parse_rollout_name, rollout_name
from fulmen.store.v1 import span_service_pb2 as pb
from fulmen.store.v1 import span_service_pb2_grpc
from fulmen_service_kit.auth import current_caller
from fulmen_service_kit.tokens import Role
from fulmen_store.domain.spans import Chunk, NewChunk, Spans
from fulmen_store.persistence.rollouts import PgRollouts
from fulmen_store.persistence.spans import PgSpans
from fulmen_store.transport.access import is_own_attempt, project_limit, require_count
from fulmen_store.transport.page_tokens import decode_token, encode_token, page_size
from fulmen_store.transport.span_codec import (
    chunk_message,
    chunks_of_export,
    decode_spans,
    model_call_problem,
    read_chunk,
)

__all__ = ["SpanService", "TraceService"]

MAX_CHUNKS = 512
MAX_PARENTS = 4096
PARENTS_PER_READ = 16
COMMITS_IN_FLIGHT = 8
MESSAGE_BYTES = 1024 * 1024
DEFAULT_PAGE = 100
KEY_BYTES = 20
MAY_RECORD_MODEL_CALLS = frozenset({Role.SERVICE, Role.ADMIN})


class SpanService(span_service_pb2_grpc.SpanServiceServicer):
    """Serves chunks of spans."""

    def __init__(self, *, spans: Spans, table: PgSpans, rollouts: PgRollouts) -> None:
        """Takes the use case and the tables that are read."""
        self._spans = spans
        self._table = table
        self._rollouts = rollouts

    async def AppendSpans(
        self, request_iterator: AsyncIterator[pb.AppendSpansRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.AppendSpansResponse]:
        """Stores chunks; answers each message after its commit, in order."""
        answers: asyncio.Queue[asyncio.Task[pb.AppendSpansResponse] | None] = asyncio.Queue(COMMITS_IN_FLIGHT)
        project_id = await self._project_limit()

        async def read() -> None:
            try:
                async for request in request_iterator:
                    await answers.put(asyncio.create_task(self._append(request, project_id), name="append-spans"))
            except FulmenError as error:
                # What was sent before is answered first.
                await answers.put(asyncio.create_task(_failed(error), name="refuse-spans"))
            else:
                await answers.put(None)

        reader = asyncio.create_task(read(), name="read-spans")
        try:
            while (answer := await answers.get()) is not None:
                yield await answer
        finally:
            reader.cancel()
            while not answers.empty():
                if (unanswered := answers.get_nowait()) is not None:
                    unanswered.cancel()

    async def ListSpans(self, request: pb.ListSpansRequest, context: grpc.aio.ServicerContext) -> pb.ListSpansResponse:
        """Lists the spans of a rollout or an attempt."""
        rollout_id, number = _parent(request.parent)
        _require_own(rollout_id, number)
        project_id = await self._project_limit()
        stored = await self._rollouts.stored([rollout_id])
        if rollout_id not in stored or project_id not in (None, stored[rollout_id][0]):
            raise RolloutNotFound("There is no such rollout.", rollout=rollout_name(rollout_id))
        last = decode_token(request.page_token, listed=f"spans/{request.parent}", key_bytes=KEY_BYTES)
        limit = page_size(request.page_size, default=DEFAULT_PAGE)
        chunks = await self._table.read([(rollout_id, number)], project_id=project_id)
        spans = [span for span in decode_spans(chunks) if last is None or span.key > last]
        token = encode_token(spans[limit - 1].key, listed=f"spans/{request.parent}") if len(spans) > limit else ""
        return pb.ListSpansResponse(
            spans=[pb.AttemptSpan(attempt=str(span.attempt), span=span.record) for span in spans[:limit]],
            next_page_token=token,
        )

    async def StreamSpans(
        self, request: pb.StreamSpansRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.StreamSpansResponse]:
        """Streams the chunks of many rollouts as they were written."""
        require_count(request.parents, field="parents", most=MAX_PARENTS)
        parents = [_parent(name) for name in request.parents]
        for rollout_id, number in parents:
            _require_own(rollout_id, number)
        project_id = await self._project_limit()
        for start in range(0, len(parents), PARENTS_PER_READ):
            chunks = await self._table.read(parents[start : start + PARENTS_PER_READ], project_id=project_id)
            message, size_bytes = pb.StreamSpansResponse(), 0
            for chunk in chunks:
                if message.chunks and size_bytes + len(chunk.payload) > MESSAGE_BYTES:
                    yield message
                    message, size_bytes = pb.StreamSpansResponse(), 0
                message.chunks.append(chunk_message(chunk))
                size_bytes += len(chunk.payload)
            if message.chunks:
                yield message

    async def _append(self, request: pb.AppendSpansRequest, project_id: int | None) -> pb.AppendSpansResponse:
        require_count(request.chunks, field="chunks", most=MAX_CHUNKS)
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
                response.rejected.add(chunk_id=str(chunk.chunk_id), message="there is no such rollout")
        return response

    async def _project_limit(self) -> int | None:
        limit = project_limit()
        return None if limit is None else await self._rollouts.project_id(limit)


class TraceService(trace_service_pb2_grpc.TraceServiceServicer):
    """Serves the standard OTLP/gRPC trace endpoint: any OpenTelemetry SDK is a writer."""

    def __init__(self, *, spans: Spans, rollouts: PgRollouts) -> None:
        """Takes the use case, and the table that knows projects."""
        self._spans = spans
        self._rollouts = rollouts

    async def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.aio.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        """Stores spans after packing them into chunks per attempt."""
        caller = current_caller()
        chunks, homeless = chunks_of_export(request, own=caller.attempt if caller.role is Role.ATTEMPT else None)
        limit = project_limit()
        project_id = None if limit is None else await self._rollouts.project_id(limit)
        kept = await self._spans.append([NewChunk(chunk=chunk, project_id=project_id) for chunk in chunks])
        refused = sum(chunk.span_count for chunk, is_kept in zip(chunks, kept, strict=True) if not is_kept)
        response = trace_service_pb2.ExportTraceServiceResponse()
        if homeless or refused:
            response.partial_success.rejected_spans = homeless + refused
            response.partial_success.error_message = (
                "Spans without the attributes fulmen.rollout and fulmen.attempt, or of unknown rollouts, are dropped."
            )
        return response


async def _failed(error: FulmenError) -> pb.AppendSpansResponse:
    raise error


def _write_problem(chunk: Chunk) -> str:
    if not is_own_attempt(chunk.rollout_id, chunk.attempt):
        return "an attempt key writes its own attempt only"
    return "" if current_caller().role in MAY_RECORD_MODEL_CALLS else model_call_problem(chunk)


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
