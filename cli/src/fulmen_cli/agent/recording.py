"""The model calls and spans of a checked agent, in memory."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.trace.v1 import trace_pb2

from fulmen.ids import rollout_of
from fulmen_cli.agent.answers import Usage

__all__ = ["CallRecord", "Recording"]

OK: Final = 200
FIRST_ERROR_STATUS: Final = 400
FIRST_SERVER_ERROR_STATUS: Final = 500
TRACEPARENT_PARTS: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRecord:
    """A model call that has ended.

    Attributes:
        path: Such as `/v1/chat/completions`.
        model: Model that the agent requested.
        status: The HTTP status of the answer.
        request: The request's JSON.
        answer: The answer's JSON, assembled from the events of a stream.
        usage: Tokens, as reported in the answer.
        error: Error reported in the answer; empty if it succeeded.
        started_ns: When it began, nanoseconds since 1970.
        ended_ns: When its answer had ended.
        trace: The trace id and parent span id that the agent sent; both empty if none.
    """

    path: str
    model: str
    status: int
    request: Mapping[str, Any] = field(repr=False)
    answer: Mapping[str, Any] = field(repr=False)
    usage: Usage
    error: str
    started_ns: int
    ended_ns: int
    trace: tuple[bytes, bytes]

    def span(self) -> trace_pb2.Span:
        """Returns the call as a span of the tree."""
        failed = self.status >= FIRST_ERROR_STATUS
        code = trace_pb2.Status.STATUS_CODE_ERROR if failed else trace_pb2.Status.STATUS_CODE_UNSET
        digest = hashlib.sha256(f"{self.path} {self.started_ns} {id(self)}".encode()).digest()
        return trace_pb2.Span(
            trace_id=self.trace[0],
            span_id=digest[:8],
            parent_span_id=self.trace[1],
            name=f"{self.path.removeprefix('/v1/')} {self.model}".rstrip(),
            start_time_unix_nano=self.started_ns,
            end_time_unix_nano=self.ended_ns,
            status=trace_pb2.Status(code=code, message=self.error),
            attributes=[_attribute("http.response.status_code", str(self.status))],
        )


class Recording:
    """The recorded calls and spans of one check. Thread-safe."""

    def __init__(self) -> None:
        """Remembers nothing yet."""
        self._lock = threading.Lock()
        self._keys: dict[str, str] = {}
        self._calls: dict[str, list[CallRecord]] = {}
        self._spans: dict[bytes, list[trace_pb2.Span]] = {}
        self._refused: list[str] = []
        self.hosts: set[str] = set()

    def begin(self, rollout: str, key: str) -> None:
        """Lets an attempt call models with a key."""
        with self._lock:
            self._keys[key] = rollout
            self._calls[rollout] = []

    def rollout_of(self, key: str) -> str | None:
        """Returns the attempt that a key belongs to, or None."""
        with self._lock:
            return self._keys.get(key)

    def add_call(self, rollout: str, call: CallRecord) -> None:
        """Adds a call."""
        with self._lock:
            self._calls[rollout].append(call)

    def add_refused(self, path: str) -> None:
        """Counts a call without a valid attempt key."""
        with self._lock:
            self._refused.append(path)

    def add_spans(self, spans: list[trace_pb2.Span]) -> None:
        """Adds spans of the agent."""
        with self._lock:
            for span in spans:
                self._spans.setdefault(span.trace_id, []).append(span)

    def calls(self, rollout: str) -> list[CallRecord]:
        """Returns an attempt's calls in the order in which they ended."""
        with self._lock:
            return list(self._calls.get(rollout, ()))

    def spans(self, trace_id: bytes) -> list[trace_pb2.Span]:
        """Returns the spans of a trace, which is a rollout."""
        with self._lock:
            return list(self._spans.get(trace_id, ()))

    def refused(self) -> list[str]:
        """Returns the paths of calls that came without an attempt's key."""
        with self._lock:
            return list(self._refused)

    def count(self, attempt: str) -> tuple[int, int]:
        """Returns how many calls an attempt made, and how many of them failed for no fault of its own."""
        calls = self.calls(rollout_of(attempt))
        return len(calls), sum(call.status >= FIRST_SERVER_ERROR_STATUS for call in calls)


def trace_of(traceparent: str) -> tuple[bytes, bytes]:
    """Reads a W3C trace context; both ids are empty if it is none."""
    parts = traceparent.split("-")
    if len(parts) != TRACEPARENT_PARTS:
        return b"", b""
    try:
        return bytes.fromhex(parts[1]), bytes.fromhex(parts[2])
    except ValueError:
        return b"", b""


def now_ns() -> int:
    """Returns the time, nanoseconds since 1970."""
    return time.time_ns()


def _attribute(key: str, value: str) -> common_pb2.KeyValue:
    return common_pb2.KeyValue(key=key, value=common_pb2.AnyValue(string_value=value))
