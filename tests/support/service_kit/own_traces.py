"""Traces of a service that are kept instead of sent."""

from __future__ import annotations

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased, Sampler

from fulmen_service_kit.observability.own_traces import OwnTraces


class KeptTraces:
    """What was added, in order."""

    def __init__(self, sampler: Sampler | None = None) -> None:
        self._exporter = InMemorySpanExporter()
        self.traces = OwnTraces(
            resource=Resource({"service.name": "fulmen-tests"}),
            sampler=sampler or ParentBased(ALWAYS_ON),
            processor=SimpleSpanProcessor(self._exporter),
        )

    @property
    def spans(self) -> list[ReadableSpan]:
        """Returns the spans."""
        return list(self._exporter.get_finished_spans())

    def named(self, name: str) -> list[ReadableSpan]:
        """Returns those of a name."""
        return [span for span in self.spans if span.name == name]


def id_of(span: ReadableSpan) -> str:
    """Returns a span's id, hexadecimal."""
    assert span.context is not None
    return f"{span.context.span_id:016x}"


def parent_of(span: ReadableSpan) -> str:
    """Returns its parent's id, hexadecimal; empty if it has none."""
    return "" if span.parent is None else f"{span.parent.span_id:016x}"
