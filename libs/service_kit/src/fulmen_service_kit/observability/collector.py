"""Exporters to an OpenTelemetry collector: OTLP over gRPC, with TLS files that may change at runtime.

Imported only if an endpoint is set: most deployments are scraped, and the exporters take time and memory.
"""

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics.export import MetricExporter, MetricExportResult, MetricsData
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from fulmen.rpc.credentials import channel_credentials
from fulmen.rpc.tls import TlsFiles, TlsMaterial, TlsWatch

ExporterT = TypeVar("ExporterT", OTLPSpanExporter, OTLPMetricExporter)


def span_exporter(endpoint: str, tls: TlsFiles | None) -> SpanExporter:
    """Returns an exporter of spans.

    Args:
        endpoint: `http://host:port`, or `https:` for TLS.
        tls: Files for TLS; None for the system's CAs.
    """
    if tls is None or not _is_tls(endpoint):
        return OTLPSpanExporter(endpoint=endpoint, insecure=not _is_tls(endpoint))
    return _SpanExporter(_Latest(TlsWatch(tls), lambda **known: OTLPSpanExporter(endpoint=endpoint, **known)))


def metric_exporter(endpoint: str, tls: TlsFiles | None) -> MetricExporter:
    """Returns an exporter of metrics; see `span_exporter`."""
    if tls is None or not _is_tls(endpoint):
        return OTLPMetricExporter(endpoint=endpoint, insecure=not _is_tls(endpoint))
    return _MetricExporter(_Latest(TlsWatch(tls), lambda **known: OTLPMetricExporter(endpoint=endpoint, **known)))


def _is_tls(endpoint: str) -> bool:
    return urlsplit(endpoint).scheme == "https"


class _Latest(Generic[ExporterT]):
    """An exporter that is recreated when its TLS files change."""

    def __init__(self, watch: TlsWatch, make: Callable[..., ExporterT]) -> None:
        self._watch = watch
        self._make: Callable[..., ExporterT] = make
        self._material = watch.material()
        self._exporter: ExporterT = self._made(self._material)

    def _made(self, material: TlsMaterial) -> ExporterT:
        return self._make(insecure=False, credentials=channel_credentials(material))

    def exporter(self) -> ExporterT:
        """Returns the current exporter."""
        material = self._watch.material()
        if material is not self._material:
            self._exporter.shutdown()
            self._material, self._exporter = material, self._made(material)
        return self._exporter


class _SpanExporter(SpanExporter):
    def __init__(self, latest: _Latest[OTLPSpanExporter]) -> None:
        self._latest = latest

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        return self._latest.exporter().export(spans)

    def shutdown(self) -> None:
        self._latest.exporter().shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._latest.exporter().force_flush(timeout_millis)


class _MetricExporter(MetricExporter):
    def __init__(self, latest: _Latest[OTLPMetricExporter]) -> None:
        super().__init__()
        self._latest = latest

    def export(self, metrics_data: MetricsData, timeout_millis: float = 10_000, **kwargs: Any) -> MetricExportResult:
        return self._latest.exporter().export(metrics_data, timeout_millis, **kwargs)

    def shutdown(self, timeout_millis: float = 30_000, **kwargs: Any) -> None:
        self._latest.exporter().shutdown(timeout_millis, **kwargs)

    def force_flush(self, timeout_millis: float = 10_000) -> bool:
        return self._latest.exporter().force_flush(timeout_millis)
