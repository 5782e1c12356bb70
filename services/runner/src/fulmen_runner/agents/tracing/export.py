"""Sends agents' spans to the store: with the runner's token from the runner, with the attempt's key from a child process.

Invariant: a child never holds the runner's token.
"""

from collections.abc import Callable, Sequence

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from fulmen.rpc.credentials import channel_credentials
from fulmen.rpc.tls import TlsFiles, TlsMaterial, TlsWatch
from fulmen.spans.delivery import DeliveringProcessor
from fulmen_runner.agents.tracing.spans import AttemptSpanProcessor, add_span_processor, attempt_of, enter_trace


class RunnerExporter(SpanExporter):
    """Exports from the runner; recreates OpenTelemetry's exporter when the token or certificates change. Not thread-safe: one thread exports."""

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


class _RenewedExporter(SpanExporter):
    """Sends with the current attempt's key; connects when the first span of an attempt is sent."""

    def __init__(self, otlp_url: str, timeout_s: float) -> None:
        self._otlp_url = otlp_url
        self._timeout_s = timeout_s
        self._key = ""
        self._exporter: OTLPSpanExporter | None = None

    def renew(self, key: str) -> None:
        """Changes the key. Call between attempts only, when nothing is being sent."""
        if self._exporter is not None:
            self._exporter.shutdown()
        self._exporter, self._key = None, key

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        if self._exporter is None:
            self._exporter = OTLPSpanExporter(
                endpoint=self._otlp_url,
                insecure=not self._otlp_url.startswith("https:"),
                headers=(("authorization", f"Bearer {self._key}"),),
                timeout=self._timeout_s,
            )
        return self._exporter.export(spans)

    def shutdown(self) -> None:
        self.renew("")


class ChildSpans:
    """Tracing in a child process."""

    def __init__(self, *, otlp_url: str, flush_s: float) -> None:
        self._flush_s = flush_s
        self._exporter = _RenewedExporter(otlp_url, flush_s)
        self._delivery = DeliveringProcessor(owner_of=attempt_of, give_up_s=flush_s, exporter=self._exporter)
        add_span_processor(AttemptSpanProcessor(self._delivery))

    def begin(self, *, key: str, traceparent: str) -> None:
        """Starts an attempt in this context."""
        self._exporter.renew(key)
        enter_trace(traceparent)

    def end(self, attempt: str) -> int:
        """Flushes the attempt's spans; returns the number that was not acknowledged. Blocks."""
        if self._delivery.undelivered(attempt):
            self._delivery.force_flush(int(self._flush_s * 1000))
        undelivered = self._delivery.undelivered(attempt)
        self._delivery.forget(attempt)
        return undelivered
