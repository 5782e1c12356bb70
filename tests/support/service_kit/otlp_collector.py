"""A collector that keeps what it is sent by OTLP/gRPC."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc
import grpc.aio
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import Span


@dataclass(frozen=True, slots=True)
class SentSpan:
    """A span, and the resource that sent it."""

    resource: Resource
    span: Span

    @property
    def service(self) -> str:
        """Who sent it."""
        return next(one.value.string_value for one in self.resource.attributes if one.key == "service.name")

    @property
    def id(self) -> str:
        """Its own id, hexadecimal."""
        return self.span.span_id.hex()

    @property
    def parent(self) -> str:
        """Its parent's id, hexadecimal; empty if it has none."""
        return self.span.parent_span_id.hex()


@dataclass(slots=True)
class Collector:
    """What has come."""

    spans: list[SentSpan] = field(default_factory=list)
    metrics: list[str] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        """Returns the names of spans."""
        return [one.span.name for one in self.spans]

    def trace(self, trace_id: str) -> list[SentSpan]:
        """Returns the spans of a trace, hexadecimal."""
        return [one for one in self.spans if one.span.trace_id.hex() == trace_id]


class _Traces(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self, collector: Collector) -> None:
        self._collector = collector

    async def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: object
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        self._collector.spans += [
            SentSpan(one.resource, span)
            for one in request.resource_spans
            for scope in one.scope_spans
            for span in scope.spans
        ]
        return trace_service_pb2.ExportTraceServiceResponse()


class _Metrics(metrics_service_pb2_grpc.MetricsServiceServicer):
    def __init__(self, collector: Collector) -> None:
        self._collector = collector

    async def Export(
        self, request: metrics_service_pb2.ExportMetricsServiceRequest, context: object
    ) -> metrics_service_pb2.ExportMetricsServiceResponse:
        self._collector.metrics += [
            metric.name for one in request.resource_metrics for scope in one.scope_metrics for metric in scope.metrics
        ]
        return metrics_service_pb2.ExportMetricsServiceResponse()


@asynccontextmanager
async def running_collector(
    credentials: grpc.ServerCredentials | None = None, *, port: int = 0
) -> AsyncIterator[tuple[Collector, str]]:
    """Yields a collector and the address at which it takes exports; with TLS if it has credentials."""
    found = Collector()
    server = grpc.aio.server()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(_Traces(found), server)
    metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(_Metrics(found), server)
    address = f"127.0.0.1:{port}"
    taken = server.add_insecure_port(address) if credentials is None else server.add_secure_port(address, credentials)
    await server.start()
    try:
        yield found, f"http{'' if credentials is None else 's'}://127.0.0.1:{taken}"
    finally:
        await server.stop(None)
