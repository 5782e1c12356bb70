"""Ingest of OTLP exports, shared by OTLP/gRPC and OTLP/HTTP."""

from __future__ import annotations

import asyncio
from typing import Final

from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

from fulmen.errors import QuotaExceeded
from fulmen_service_kit.security.auth import current_caller
from fulmen_service_kit.security.tokens import Role
from fulmen_store.metrics import StoreMetrics
from fulmen_store.spans.spans import Spans
from fulmen_store.spans.table import ATTEMPT_OVER
from fulmen_store.transport.otlp.codec import SplitExport, export_from_json, loose_spans

__all__ = ["OtlpIngest"]

# Larger exports are decoded in a thread; inline they would block the event loop for longer than a thread costs.
INLINE_DECODE_BYTES: Final = 1024 * 1024
INLINE_JSON_BYTES: Final = 16 * 1024
MAX_BYTES_IN_FLIGHT: Final = 128 * 1024 * 1024
RETRY_AFTER_S: Final = 1.0


class OtlpIngest:
    """Stores exports on behalf of the current caller."""

    def __init__(self, *, spans: Spans, metrics: StoreMetrics) -> None:
        self._spans = spans
        self._metrics = metrics
        self._bytes_in_flight = 0

    async def export(self, body: bytes, *, as_json: bool = False) -> trace_service_pb2.ExportTraceServiceResponse:
        """Stores the spans of an export; returns, after the commit, the number of refused spans and why.

        Raises:
            ArgumentInvalid: If it is not a well-formed export.
            QuotaExceeded: If too many exports are in progress; the same export may be retried shortly after.
            DatabaseUnavailable: If the outcome is unknown; the same export may be retried.
        """
        if self._bytes_in_flight and self._bytes_in_flight + len(body) > MAX_BYTES_IN_FLIGHT:
            raise QuotaExceeded(
                "Too many spans are being stored; retry in a moment.",
                retry_after_s=RETRY_AFTER_S,
                quota="bytes in flight",
            )
        self._bytes_in_flight += len(body)
        try:
            return await self._store(body, as_json=as_json)
        finally:
            self._bytes_in_flight -= len(body)

    async def _store(self, body: bytes, *, as_json: bool) -> trace_service_pb2.ExportTraceServiceResponse:
        caller = current_caller()
        own = caller.attempt if caller.role is Role.ATTEMPT else None

        def take_apart() -> SplitExport:
            return loose_spans(export_from_json(body) if as_json else body, own=own)

        if len(body) <= (INLINE_JSON_BYTES if as_json else INLINE_DECODE_BYTES):
            split = take_apart()
        else:
            split = await asyncio.to_thread(take_apart)
        # Attempts that the caller may not access are treated as nonexistent.
        reached = [part for part in split.loose if caller.may_access(part.project)]
        problems = await self._spans.append_loose(reached)
        kept = late = 0
        for part, problem in zip(reached, problems, strict=True):
            kept += 0 if problem else part.span_count
            late += part.span_count if problem == ATTEMPT_OVER else 0
        unknown = sum(part.span_count for part in split.loose) - kept - late
        response = _response(split, unknown=unknown, late=late)
        self._metrics.spans_rejected(response.partial_success.rejected_spans)
        return response


def _response(split: SplitExport, *, unknown: int, late: int) -> trace_service_pb2.ExportTraceServiceResponse:
    response = trace_service_pb2.ExportTraceServiceResponse()
    homeless, foreign, oversized = split.homeless, split.foreign, split.oversized
    reasons = [
        text
        for count, text in (
            (homeless, f"{homeless} spans name no attempt by the attributes fulmen.rollout and fulmen.attempt."),
            (foreign, f"{foreign} spans name an attempt other than the key's."),
            (unknown, f"{unknown} spans are of rollouts that do not exist."),
            (late, f"{late} spans arrived after the end of their attempt and the grace period of its key."),
            (oversized, f"{oversized} spans are larger than 1 MiB."),
        )
        if count
    ]
    if reasons:
        response.partial_success.rejected_spans = homeless + foreign + oversized + unknown + late
        response.partial_success.error_message = " ".join(reasons)
    return response
