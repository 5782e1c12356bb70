"""Traces a command that is written in Python; runs in its process, by `startup/sitecustomize.py`.

Invariant: the program's own OpenTelemetry set-up, if it has one, stays as it is: nothing global is replaced. Needs
nothing that instrumentors do not need themselves; the runner need not be installed there.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Mapping, MutableMapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from fulmen_runner.agents.instrumentation import NONE, instrument, new_provider

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter

INSTRUMENT_VARIABLE = "FULMEN_INSTRUMENT"
TRACES_URL_VARIABLE = "FULMEN_TRACES_URL"
STARTUP_FOLDER = Path(__file__).parent / "startup"

_MODEL_VARIABLES = ("OPENAI_BASE_URL", "ANTHROPIC_BASE_URL")


def startup_environment(wanted: str, inherited: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables by which every Python of a command switches on its instrumentors.

    Args:
        wanted: See `instrument`.
        inherited: What commands get of the runner's environment.
    """
    if wanted == NONE:
        return {}
    path = [str(STARTUP_FOLDER), *filter(None, [inherited.get("PYTHONPATH", "")])]
    return {INSTRUMENT_VARIABLE: wanted, "PYTHONPATH": os.pathsep.join(path)}


def start(environ: Mapping[str, str]) -> None:
    """Chooses instrumentors; the rest follows when a framework is imported that one of them is for."""
    if instrument(environ.get(INSTRUMENT_VARIABLE, NONE), _report, provider=_tracing):
        _enter_trace(environ)


def _report(instrumentor: str, reason: str) -> None:
    print(f"fulmen: the instrumentor {instrumentor} was left out: {reason}", file=sys.stderr)


def _enter_trace(environ: Mapping[str, str]) -> None:
    from opentelemetry import context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    # Never detached: it is the attempt's from the first line to the last.
    context.attach(TraceContextTextMapPropagator().extract({"traceparent": environ.get("TRACEPARENT", "")}))


@functools.cache
def _tracing() -> TracerProvider:
    """Sets up what sends spans, and puts model calls below the spans that make them."""
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    from fulmen_runner.agents.current_spans import CurrentSpans
    from fulmen_runner.agents.http_clients import on_every_request, origin_of
    from fulmen_runner.agents.threads import carry_context_into_threads

    provider = new_provider(shutdown_on_exit=True)
    provider.add_span_processor(BatchSpanProcessor(_exporter()))
    provider.add_span_processor(CurrentSpans())
    carry_context_into_threads()
    origins = {origin_of(os.environ[name]) for name in _MODEL_VARIABLES if os.environ.get(name)}

    def add_trace_context(origin: tuple[str, str, int | None], headers: MutableMapping[str, str]) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        if origin in origins and "traceparent" not in headers:
            TraceContextTextMapPropagator().inject(headers)

    on_every_request(add_trace_context)
    return provider


def _exporter() -> SpanExporter:
    """Makes the exporter; over HTTP if it can be, since processes that use gRPC cannot well be forked."""
    url = os.environ.get(TRACES_URL_VARIABLE, "")
    if url and find_spec("opentelemetry.exporter.otlp.proto.http") is not None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

        return HttpExporter(endpoint=url)
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

    return GrpcExporter()
