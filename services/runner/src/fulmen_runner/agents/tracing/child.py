"""Tracing of a child process, in whatever Python it runs."""

from typing import Protocol


class Spans(Protocol):
    """The spans of a child's attempts."""

    def begin(self, *, key: str, traceparent: str) -> None:
        """Starts an attempt in this context."""

    def end(self, attempt: str) -> int:
        """Flushes the attempt's spans; returns the number that was not acknowledged. Blocks."""


class NoSpans:
    """No spans: a Python without OpenTelemetry. Model calls and rewards are recorded all the same, by proxy and runner."""

    def begin(self, *, key: str, traceparent: str) -> None:
        """Does nothing."""

    def end(self, attempt: str) -> int:
        """Returns 0."""
        return 0


def child_spans(*, otlp_url: str, flush_s: float) -> tuple[Spans, str]:
    """Returns the spans of a child, and why there are none; empty if there are.

    A virtual environment may have no OpenTelemetry, or one that the runner cannot use.
    """
    try:
        from fulmen_runner.agents.tracing.export import ChildSpans

        return ChildSpans(otlp_url=otlp_url, flush_s=flush_s), ""
    except Exception as error:  # noqa: BLE001  # Packages of the agent, of any version.
        return NoSpans(), f"{type(error).__name__}: {error}"
