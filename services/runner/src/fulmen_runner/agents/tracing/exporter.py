"""Sends spans of in-process agents to the store, with the runner's current token and certificate."""

from collections.abc import Callable, Sequence

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from fulmen.rpc.credentials import channel_credentials
from fulmen.tls import TlsFiles, TlsMaterial, TlsWatch


class RunnerExporter(SpanExporter):
    """OpenTelemetry's exporter, recreated when the token or certificates change. Not thread-safe: one thread exports."""

    def __init__(self, *, otlp_url: str, token: Callable[[], str], tls: TlsFiles | None, timeout_s: float) -> None:
        """Initializes the exporter.

        Args:
            otlp_url: OTLP over gRPC; `https:` for TLS.
            token: Returns the runner's token. Secret.
            tls: Files for TLS; None for no TLS or the system's CAs.
            timeout_s: Timeout of a batch including retries, in seconds.

        Raises:
            OSError: If a file of `tls` cannot be read.
        """
        self._otlp_url = otlp_url
        self._token = token
        self._watch = None if tls is None else TlsWatch(tls)
        self._timeout_s = timeout_s
        self._made_with: tuple[str, TlsMaterial | None] | None = None
        self._exporter: OTLPSpanExporter | None = None

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Sends a batch."""
        now = (self._token(), None if self._watch is None else self._watch.material())
        if self._exporter is None or now != self._made_with:
            if self._exporter is not None:
                self._exporter.shutdown()
            self._exporter, self._made_with = self._make(*now), now
        return self._exporter.export(spans)

    def shutdown(self) -> None:
        """Closes the connection."""
        if self._exporter is not None:
            self._exporter.shutdown()

    def _make(self, token: str, material: TlsMaterial | None) -> OTLPSpanExporter:
        is_tls = self._otlp_url.startswith("https:")
        return OTLPSpanExporter(
            endpoint=self._otlp_url,
            insecure=not is_tls,
            credentials=channel_credentials(material) if is_tls and material is not None else None,
            headers=(("authorization", f"Bearer {token}"),),
            timeout=self._timeout_s,
        )
