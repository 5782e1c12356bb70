"""OpenTelemetry of the service itself: traces and metrics by OTLP where an endpoint is set, /metrics always."""

from opentelemetry import metrics, trace
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricReader, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from prometheus_client import start_http_server

from fulmen_service_kit.errors import StartupError
from fulmen_service_kit.settings import ServiceSettings


class Telemetry:
    """The providers of one process; `close` sends what is still buffered."""

    def __init__(self, settings: ServiceSettings) -> None:
        resource = Resource.create({"service.name": f"fulmen-{settings.service_name}"})
        readers: list[MetricReader] = [PrometheusMetricReader()]
        self._tracers: TracerProvider | None = None
        if settings.otlp_endpoint:
            # Imported here: most deployments are scraped, and the exporters take time and memory.
            from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

            exporter = OTLPMetricExporter(endpoint=settings.otlp_endpoint, insecure=True)
            readers.append(PeriodicExportingMetricReader(exporter))
            self._tracers = TracerProvider(resource=resource)
            self._tracers.add_span_processor(
                BatchSpanProcessor(OTLPSpanExporter(endpoint=settings.otlp_endpoint, insecure=True))
            )
            trace.set_tracer_provider(self._tracers)
        self._meters = MeterProvider(metric_readers=readers, resource=resource)
        metrics.set_meter_provider(self._meters)

    def close(self) -> None:
        """Sends what is buffered and stops."""
        if self._tracers is not None:
            self._tracers.shutdown()
        self._meters.shutdown()


def serve_metrics(settings: ServiceSettings) -> tuple[int, object]:
    """Serves /metrics in a thread of its own; returns the port and the server.

    Raises:
        StartupError: If the port cannot be bound.
    """
    try:
        server, _ = start_http_server(settings.metrics_port, addr=settings.host)
    except OSError:
        address = f"{settings.host}:{settings.metrics_port}"
        raise StartupError(f"Cannot serve metrics on {address}: the port is in use. Choose another.") from None
    return server.server_port, server
