"""Makes work for unit tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

from fulmen.ids import DEFAULT_PROJECT, attempt_name, rollout_name, uuid7
from fulmen_runner.attempts.assignment import JSON_CONTENT_TYPE, Assignment, Mode


def assignment(
    *, input_: bytes = b"{}", content_type: str = JSON_CONTENT_TYPE, key: str = "secret-key", timeout_s: float = 30.0
) -> Assignment:
    """Returns an attempt of a new rollout."""
    rollout_id = uuid7()
    return Assignment(
        attempt=attempt_name(DEFAULT_PROJECT, rollout_id, 1),
        rollout=rollout_name(DEFAULT_PROJECT, rollout_id),
        number=1,
        lease_id="session",
        epoch=1,
        project="projects/default",
        mode=Mode.TRAIN,
        agent="resources/agent.x/versions/1",
        input=input_,
        input_content_type=content_type,
        resource_versions={},
        attempt_key=key,
        timeout_s=timeout_s,
    )


@contextmanager
def tracing_restored() -> Iterator[None]:
    """Takes what the body adds to the process's tracing away again: other tests of this process look at it, too."""
    provider = trace.get_tracer_provider()
    if not isinstance(provider, TracerProvider):
        provider = TracerProvider(shutdown_on_exit=False)
        trace.set_tracer_provider(provider)
    active = provider._active_span_processor
    before = active._span_processors
    try:
        yield
    finally:
        active._span_processors = before
