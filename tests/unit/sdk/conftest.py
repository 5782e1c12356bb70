"""Fixtures: tracing into memory, as a runner's process has it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from fulmen.agent import Context, entered


@pytest.fixture
def spans() -> Iterator[InMemorySpanExporter]:
    """Yields what collects the spans of this test, which runs in an attempt."""
    provider = trace.get_tracer_provider()
    if not isinstance(provider, TracerProvider):
        provider = TracerProvider(shutdown_on_exit=False)
        trace.set_tracer_provider(provider)
    exporter = InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    context = Context(
        rollout="projects/default/rollouts/x",
        attempt="projects/default/rollouts/x/attempts/1",
        attempt_number=1,
        mode="train",
        deadline=0.0,
        environment={"OPENAI_API_KEY": "the-key-of-the-attempt"},
    )
    with entered(context):
        yield exporter
    exporter.shutdown()
