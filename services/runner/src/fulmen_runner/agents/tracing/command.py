"""Traces a command that is written in Python; runs in its process, by `startup/sitecustomize.py`.

Invariants: the program's own OpenTelemetry set-up, if it has one, stays as it is: nothing global is replaced. Spans that
did not reach the store by the program's end are told to the runner. Needs nothing that instrumentors do not need
themselves; neither runner nor SDK need be installed there.
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
"""Where the runner's own SDK lies."""
STARTUP_FOLDER = Path(__file__).parent / "startup"

_GIVE_UP_S = 30.0
_OWNER = "this process"
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
    sdk = find_spec("fulmen.span_delivery")
    assert sdk is not None  # The runner needs it.
    assert sdk.origin is not None
    folder = str(Path(sdk.origin).parent)
    return {INSTRUMENT_VARIABLE: wanted, "PYTHONPATH": os.pathsep.join(path), SDK_VARIABLE: folder}


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
    from fulmen_runner.agents.python.threads import carry_context_into_threads
    from fulmen_runner.agents.tracing.current_spans import CurrentSpans
    from fulmen_runner.agents.tracing.http_clients import on_every_request, origin_of

    delivery = _sdk_module("span_delivery").DeliveringProcessor(
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
    """Sends what is left, and says what could not be sent."""
    provider.shutdown()
    _sdk_module("rewards_file").tell_undelivered_spans(delivery.undelivered(_OWNER))


def _sdk_module(name: str) -> Any:
    """Imports a module of the SDK that needs nothing else of it; in a Python without SDK, from the runner's."""
    try:
        return import_module(f"fulmen.{name}")
    except ImportError:
        # None at all, or one that is older.
        spec = spec_from_file_location(f"fulmen_runner.{name}", Path(os.environ[SDK_VARIABLE], f"{name}.py"))
        assert spec is not None
        assert spec.loader is not None
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        return module


def _exporter() -> SpanExporter:
    """Makes the exporter; over HTTP if it can be, since processes that use gRPC cannot well be forked."""
    url = os.environ.get(TRACES_URL_VARIABLE, "")
    if url and find_spec("opentelemetry.exporter.otlp.proto.http") is not None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

        return HttpExporter(endpoint=url)
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

    return GrpcExporter()
