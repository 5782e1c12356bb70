"""Traces a command that is a Python program; loaded in its process by `startup/sitecustomize.py`.

Invariants: the program's own OpenTelemetry setup is unchanged; nothing global is replaced. Spans that have not reached
the store when the program exits are reported to the runner. Depends only on packages that instrumentors need; neither
runner nor SDK has to be installed.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
from collections.abc import Mapping, MutableMapping
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fulmen_runner.agents.tracing.instrumentation import NONE, instrument, new_provider

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter

INSTRUMENT_VARIABLE = "FULMEN_INSTRUMENT"
TRACES_URL_VARIABLE = "FULMEN_TRACES_URL"
SDK_VARIABLE = "FULMEN_SDK_FOLDER"
"""Folder of the runner's SDK."""
STARTUP_FOLDER = Path(__file__).parent / "startup"

_GIVE_UP_S = 30.0
_OWNER = "this process"
_MODEL_VARIABLES = ("OPENAI_BASE_URL", "ANTHROPIC_BASE_URL")


def startup_environment(wanted: str, inherited: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that enable instrumentors in every Python process of a command.

    Args:
        wanted: See `instrument`.
        inherited: Variables that commands inherit from the runner.
    """
    if wanted == NONE:
        return {}
    path = [str(STARTUP_FOLDER), *filter(None, [inherited.get("PYTHONPATH", "")])]
    sdk = find_spec("fulmen")
    assert sdk is not None  # A dependency of the runner.
    assert sdk.origin is not None
    folder = str(Path(sdk.origin).parent)
    return {INSTRUMENT_VARIABLE: wanted, "PYTHONPATH": os.pathsep.join(path), SDK_VARIABLE: folder}


def start(environ: Mapping[str, str]) -> None:
    """Registers instrumentors; each is enabled when its framework is imported."""
    if instrument(environ.get(INSTRUMENT_VARIABLE, NONE), _report, provider=_tracing):
        _enter_trace(environ)


def _report(instrumentor: str, reason: str) -> None:
    print(f"fulmen: instrumentor {instrumentor} is not enabled: {reason}", file=sys.stderr)


def _enter_trace(environ: Mapping[str, str]) -> None:
    from opentelemetry import context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    # Never detached: the whole process belongs to the attempt.
    context.attach(TraceContextTextMapPropagator().extract({"traceparent": environ.get("TRACEPARENT", "")}))


@functools.cache
def _tracing() -> TracerProvider:
    """Creates the provider, and propagates the trace context to model calls."""
    from fulmen_runner.agents.python.threads import carry_context_into_threads
    from fulmen_runner.agents.tracing.current_spans import CurrentSpans
    from fulmen_runner.agents.tracing.http_clients import on_every_request, origin_of

    delivery = _sdk_module("fulmen.spans.delivery").DeliveringProcessor(
        owner_of=lambda _: _OWNER, give_up_s=_GIVE_UP_S, exporter=_exporter()
    )
    provider = new_provider(shutdown_on_exit=False)
    provider.add_span_processor(delivery)
    atexit.register(_end, provider, delivery)
    provider.add_span_processor(CurrentSpans())
    carry_context_into_threads()
    origins = {origin_of(os.environ[name]) for name in _MODEL_VARIABLES if os.environ.get(name)}

    def add_trace_context(origin: tuple[str, str, int | None], headers: MutableMapping[str, str]) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        if origin in origins and "traceparent" not in headers:
            TraceContextTextMapPropagator().inject(headers)

    on_every_request(add_trace_context)
    return provider


def _end(provider: TracerProvider, delivery: Any) -> None:
    """Flushes spans, and reports those that were not delivered."""
    provider.shutdown()
    _sdk_module("fulmen.attempt_files").report_undelivered_spans(delivery.undelivered(_OWNER))


def _sdk_module(name: str) -> Any:
    """Imports a self-contained module of the SDK; in a Python without the SDK, from the runner's."""
    try:
        return import_module(name)
    except ImportError:
        # The SDK is not installed, or older.
        _, *path = name.split(".")
        spec = spec_from_file_location(
            f"fulmen_runner.{name}", Path(os.environ[SDK_VARIABLE], *path).with_suffix(".py")
        )
        assert spec is not None
        assert spec.loader is not None
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        return module


def _exporter() -> SpanExporter:
    """Returns the exporter: over HTTP if available, since gRPC does not work well with forks."""
    url = os.environ.get(TRACES_URL_VARIABLE, "")
    if url and find_spec("opentelemetry.exporter.otlp.proto.http") is not None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

        return HttpExporter(endpoint=url)
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

    return GrpcExporter()
