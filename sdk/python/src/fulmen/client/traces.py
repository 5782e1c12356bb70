"""Spans, model calls and traces as records."""

from __future__ import annotations

import datetime
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any, ClassVar

from opentelemetry.proto.trace.v1 import trace_pb2

from fulmen.client.view import View
from fulmen.ids import rollout_of
from fulmen.model_call import unpack_logprobs, unpack_token_ids
from fulmen.spans.export import attribute_value
from fulmen.store.v1 import span_service_pb2
from fulmen.type.v1 import model_call_pb2

__all__ = ["ModelCall", "Span", "Trace"]


class ModelCall(View[model_call_pb2.ModelCallRecord]):
    """A captured model call, token by token."""

    __slots__ = ()
    _shown: ClassVar[tuple[str, ...]] = ("model", "finish_reason")

    @property
    def model(self) -> str:
        """The model that the agent named."""
        return str(self.proto.model)

    @property
    def policy(self) -> str:
        """The policy that sampled the tokens; empty if it is not trainable."""
        return str(self.proto.policy)

    @property
    def request(self) -> Any:
        """The request as it was sent to the backend; None if it is not JSON."""
        return _json(self.proto.request_json)

    @property
    def response(self) -> Any:
        """The answer as the agent saw it; None if it is not JSON."""
        return _json(self.proto.response_json)

    @property
    def finish_reason(self) -> str:
        """Why the model stopped: `stop`, `length`, `tool_calls` or another value of the backend."""
        return str(self.proto.finish_reason)

    @property
    def prompt_token_ids(self) -> list[int]:
        """The whole prompt, tokens."""
        return list(unpack_token_ids(self.proto.prompt_token_ids))

    @property
    def completion_token_ids(self) -> list[int]:
        """The sampled tokens."""
        return list(unpack_token_ids(self.proto.completion_token_ids))

    @property
    def completion_logprobs(self) -> list[float]:
        """Natural log-probability of each sampled token, under the distribution that it was sampled from."""
        return list(unpack_logprobs(self.proto.completion_logprobs))

    @property
    def is_usable(self) -> bool:
        """Whether it may be trained on; otherwise `proto.unusable_reason` has the reason."""
        return bool(self.proto.usable)


class Span(View[span_service_pb2.AttemptSpan]):
    """A span of an attempt."""

    # cached_property needs a dictionary.
    __slots__ = ("__dict__",)
    _shown: ClassVar[tuple[str, ...]] = ("name", "duration_s")

    @cached_property
    def otlp(self) -> trace_pb2.Span:
        """The span as OpenTelemetry's message."""
        return trace_pb2.Span.FromString(self.proto.span.otlp_span)

    @property
    def name(self) -> str:
        """Name of the span."""
        return str(self.otlp.name)

    @property
    def attempt(self) -> str:
        """`projects/{project}/rollouts/{uuid}/attempts/{n}`."""
        return str(self.proto.attempt)

    @property
    def span_id(self) -> str:
        """16 hexadecimal digits."""
        return str(self.otlp.span_id.hex())

    @property
    def parent_span_id(self) -> str:
        """16 hexadecimal digits; empty without a parent."""
        return str(self.otlp.parent_span_id.hex())

    @property
    def attributes(self) -> dict[str, Any]:
        """Attributes of the span."""
        return {pair.key: attribute_value(pair.value) for pair in self.otlp.attributes}

    @property
    def start_time(self) -> datetime.datetime:
        """When it began, UTC."""
        return _at(self.otlp.start_time_unix_nano)

    @property
    def end_time(self) -> datetime.datetime:
        """When it ended, UTC."""
        return _at(self.otlp.end_time_unix_nano)

    @property
    def duration_s(self) -> float:
        """Duration, in seconds."""
        return float(self.otlp.end_time_unix_nano - self.otlp.start_time_unix_nano) / 1e9

    @property
    def is_error(self) -> bool:
        """Whether it failed."""
        return bool(self.otlp.status.code == trace_pb2.Status.STATUS_CODE_ERROR)

    @property
    def scope(self) -> str:
        """Instrumentation scope, such as `fulmen.llm_proxy`."""
        return str(self.proto.span.scope)

    @cached_property
    def model_call(self) -> ModelCall | None:
        """The captured model call; None if it is another span."""
        packed = self.proto.span.model_call
        return ModelCall(model_call_pb2.ModelCallRecord.FromString(packed)) if packed else None


class Trace:
    """All spans of a rollout.

    Attributes:
        rollout: `projects/{project}/rollouts/{uuid}`.
        spans: The spans, ordered by start time.
    """

    def __init__(self, rollout: str, spans: list[Span]) -> None:
        """Keeps the spans."""
        self.rollout = rollout_of(rollout)
        self.spans = spans

    def __iter__(self) -> Iterator[Span]:
        """Iterates over the spans, ordered by start time."""
        return iter(self.spans)

    def __len__(self) -> int:
        """Returns the number of spans."""
        return len(self.spans)

    def __repr__(self) -> str:
        """Shows the rollout and how many spans it has."""
        return f"Trace(rollout={self.rollout!r}, spans={len(self.spans)})"

    @property
    def roots(self) -> list[Span]:
        """Spans whose parent is not in the trace; and of spans that are below each other in a circle the first one."""
        return list(self._below.get(None, ()))

    @property
    def model_calls(self) -> list[ModelCall]:
        """The captured model calls, in order of their start."""
        return [each.model_call for each in self.spans if each.model_call is not None]

    def children(self, span: Span) -> list[Span]:
        """Returns the spans directly below a span; each span but the roots is below one, and none is below itself."""
        return list(self._below.get(_place(span), ()))

    @cached_property
    def _below(self) -> Mapping[_Place | None, list[Span]]:
        """Spans by the place of what they are below; None for the roots."""
        spans = {_place(span): span for span in reversed(self.spans)}
        above = {place: (place[0], span.parent_span_id) for place, span in spans.items()}
        for circle in _circles(above):
            del above[min(circle, key=lambda place: (spans[place].otlp.start_time_unix_nano, place))]
        below: defaultdict[_Place | None, list[Span]] = defaultdict(list)
        for place, span in reversed(spans.items()):
            parent = above.get(place)
            below[parent if parent in spans else None].append(span)
        return below


_Place = tuple[str, str]
"""An attempt, and an id of a span in it."""


def _place(span: Span) -> _Place:
    return span.attempt, span.span_id


def _circles(above: Mapping[_Place, _Place]) -> list[list[_Place]]:
    """Returns the places that are above themselves, by circle."""
    found, done = [], set[_Place]()
    for place in above:
        way: dict[_Place, int] = {}
        while place in above and place not in done and place not in way:
            way[place] = len(way)
            place = above[place]
        if place in way:
            found.append([*way][way[place] :])
        done |= way.keys()
    return found


def _json(content: bytes) -> Any:
    try:
        return json.loads(content)
    except ValueError:
        return None


def _at(unix_ns: int) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(0, datetime.UTC) + datetime.timedelta(microseconds=unix_ns // 1000)
