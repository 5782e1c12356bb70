"""OpenTelemetry of the service itself: traces and metrics over OTLP if an endpoint is set, and /metrics."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterable
from importlib.metadata import version
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

from opentelemetry import metrics, trace
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricReader, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from prometheus_client import make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

from fulmen_service_kit.errors import StartupError
from fulmen_service_kit.observability.own_traces import OwnTraces, set_own_traces
from fulmen_service_kit.readiness import Readiness
from fulmen_service_kit.settings import ServiceSettings

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider


class Telemetry:
    """The tracer and meter providers of the process."""

    def __init__(self, settings: ServiceSettings) -> None:
        names = {"service.name": f"fulmen-{settings.service_name}", "service.version": version("fulmen")}
        resource = Resource.create(names)
        readers: list[MetricReader] = [PrometheusMetricReader()]
        self._tracers: TracerProvider | None = None
        if settings.otlp_endpoint:
            from fulmen_service_kit.observability import collector

            exporter = collector.metric_exporter(settings.otlp_endpoint, settings.peer_tls())
            readers.append(PeriodicExportingMetricReader(exporter))
            self._tracers = _export_traces(settings, resource)
        self._meters = MeterProvider(metric_readers=readers, resource=resource)
        metrics.set_meter_provider(self._meters)

    def close(self) -> None:
        """Flushes and stops."""
        if self._tracers is not None:
            set_own_traces(None)
            self._tracers.shutdown()
        self._meters.shutdown()


def _export_traces(settings: ServiceSettings, resource: Resource) -> TracerProvider:
    """Sends the process's traces to the collector; without one the SDK's part for traces is not even loaded."""
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    from fulmen_service_kit.observability import collector

    tracers = TracerProvider(resource=resource)
    processor = BatchSpanProcessor(collector.span_exporter(settings.otlp_endpoint, settings.peer_tls()))
    tracers.add_span_processor(processor)
    trace.set_tracer_provider(tracers)
    set_own_traces(OwnTraces(resource=resource, sampler=tracers.sampler, processor=processor))
    return tracers


def serve_metrics(settings: ServiceSettings, readiness: Readiness) -> tuple[int, object]:
    """Serves /metrics, /healthz and /readyz over HTTP in its own threads; returns the port and the server.

    Raises:
        StartupError: If the port cannot be bound.
    """
    metrics_app = make_wsgi_app()

    def app(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if path == "/metrics":
            return metrics_app(environ, start_response)
        if path == "/healthz":
            ready, content_type, body = True, "text/plain", b"ok\n"
        elif path == "/readyz":
            content_type = "application/json"
            ready, body = readiness.page()
        else:
            start_response("404 Not Found", [("Content-Type", "text/plain")])
            return [b"not found; try /metrics, /healthz or /readyz\n"]
        start_response("200 OK" if ready else "503 Service Unavailable", [("Content-Type", content_type)])
        return [body]

    class Server(ThreadingWSGIServer):
        address_family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET

    try:
        server = make_server(settings.host, settings.metrics_port, app, Server, _Silent)
    except OSError:
        address = f"{settings.host}:{settings.metrics_port}"
        raise StartupError(f"cannot serve metrics on {address}: port is in use. Choose another port.") from None
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    return server.server_port, server


class _Silent(WSGIRequestHandler):
    def parse_request(self) -> bool:
        """Parses a request; refuses one that the services' other HTTP ports refuse, too: RFC 9112, 3.2."""
        if not super().parse_request():
            return False
        hosts = len(self.headers.get_all("host", ()))
        if hosts > 1 or (not hosts and self.request_version == "HTTP/1.1"):
            self.send_error(400, "request needs one host")
            return False
        return True

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # named as in the base class
        """Logs nothing."""
