"""The parts of the store that have to do with spans, put together: ingest, reading, blobs and retention."""

from __future__ import annotations

import datetime
from contextlib import AsyncExitStack
from dataclasses import dataclass

import grpc.aio

from fulmen.store.v1 import span_service_pb2_grpc
from fulmen_service_kit.http_server import HttpServer, bind
from fulmen_service_kit.lifecycle import Role
from fulmen_service_kit.server import RpcServer
from fulmen_store.database.database import Database
from fulmen_store.metrics import StoreMetrics
from fulmen_store.retention.retention import Retention
from fulmen_store.retention.table import RetentionTable
from fulmen_store.rollouts.table import RolloutTable
from fulmen_store.settings import StoreSettings
from fulmen_store.spans.blobs import Blobs, open_storage
from fulmen_store.spans.spans import Spans
from fulmen_store.spans.table import SpanTable
from fulmen_store.traces import RolloutTraces
from fulmen_store.transport.otlp_http import OtlpDoor
from fulmen_store.transport.otlp_ingest import OtlpIngest
from fulmen_store.transport.span_codec import compress
from fulmen_store.transport.span_service import SpanService, add_trace_service

__all__ = ["SpanParts", "wire_spans"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanParts:
    """Use cases, services and background roles of spans."""

    spans: Spans
    service: SpanService
    ingest: OtlpIngest
    retention: Retention
    database: Database

    def roles(self) -> dict[str, Role]:
        """Returns the background roles by name."""
        return {
            "span-committer": self.spans.committer,
            "span-packer": self.spans.packer,
            "retention": self.retention,
        }

    def register(self, server: grpc.aio.Server) -> None:
        """Adds the services."""
        span_service_pb2_grpc.add_SpanServiceServicer_to_server(self.service, server)
        add_trace_service(self.ingest, server)

    def serve_http(self, server: RpcServer, settings: StoreSettings, stack: AsyncExitStack) -> HttpServer:
        """Binds the port of OTLP/HTTP, whose callers are those of the gRPC server.

        Raises:
            StartupError: if the port cannot be bound.
        """
        door = OtlpDoor(
            ingest=self.ingest,
            authenticator=server.authenticator,
            max_body_bytes=settings.max_message_bytes,
            is_ready=lambda: self.database.is_up,
        )
        listener = bind(settings.host, settings.http_port)
        http = HttpServer(door=door, listener=listener, grace_s=settings.drain_grace_s, tls=settings.own_tls())
        stack.callback(http.close)
        return http


def wire_spans(
    database: Database,
    settings: StoreSettings,
    *,
    rollouts: RolloutTable,
    metrics: StoreMetrics,
    traces: RolloutTraces | None,
) -> SpanParts:
    """Wires the parts.

    Raises:
        StartupError: if the blob URL is not usable.
    """
    blobs = Blobs(open_storage(settings.blob_url)) if settings.blob_url else None
    table = SpanTable(database, blobs=blobs)
    spans = Spans(
        table=table,
        compress=compress,
        blobs=blobs,
        blob_min_bytes=settings.blob_min_bytes,
        observe_batch=metrics.batch,
        stored=None if traces is None else traces.stored,
    )
    return SpanParts(
        spans=spans,
        service=SpanService(spans=spans, table=table, rollouts=rollouts, metrics=metrics),
        ingest=OtlpIngest(spans=spans, project_id=rollouts.project_id, metrics=metrics),
        retention=Retention(
            table=RetentionTable(database), blobs=blobs, today=lambda: datetime.datetime.now(datetime.UTC).date()
        ),
        database=database,
    )
