"""One model call, token by token: packs its arrays and reads `fulmen.type.v1.ModelCallRecord`.

Invariant: on the wire every array is little-endian and unpadded, four bytes per entry, on any machine; a `ModelCall`
has one log-probability per completion token, and its `versions` cover the completion in order.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

from google.protobuf.message import DecodeError
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from fulmen.routed_experts import RoutedExperts, RoutedExpertsInvalid
from fulmen.store.v1.span_pb2 import SpanRecord
from fulmen.type.v1.model_call_pb2 import ModelCallRecord
from fulmen.type.v1.model_call_pb2 import RoutedExperts as RoutedExpertsMessage

_T = TypeVar("_T", int, float)

ENTRY_BYTES = 4
"""Size of one packed token id (int32) or log-probability (float32)."""

RESEND_COUNT_ATTRIBUTE = "http.request.resend_count"
"""Span attribute: how many times the client had sent this request before (OpenTelemetry HTTP conventions)."""

COST_ATTRIBUTE = "fulmen.cost_usd"
"""Span attribute: cost of the call by the proxy's price table, in US dollars; absent without a price or usage."""

CHOICE_ATTRIBUTE = "fulmen.choice"
"""Span attribute: index of the choice in its answer, from 0; absent on the first."""

CLIENT_GONE_ATTRIBUTE = "fulmen.client_disconnected"
"""Span attribute: true if the client disconnected before the end of the answer."""

REPLAYED_ATTRIBUTE = "fulmen.replayed_span"
"""Span attribute: id of the span, in a lost attempt, of the call that sampled the tokens, 16 hexadecimal digits; absent if
this call did."""

_READ_ATTRIBUTES = frozenset({RESEND_COUNT_ATTRIBUTE, CLIENT_GONE_ATTRIBUTE, CHOICE_ATTRIBUTE, REPLAYED_ATTRIBUTE})
_RESEND, _GONE, _CHOICE, _REPLAYED = (
    key.encode() for key in (RESEND_COUNT_ATTRIBUTE, CLIENT_GONE_ATTRIBUTE, CHOICE_ATTRIBUTE, REPLAYED_ATTRIBUTE)
)


class ModelCallInvalid(ValueError):
    """The packed model call is inconsistent and cannot be read."""


def pack_token_ids(token_ids: Iterable[int]) -> bytes:
    """Packs token ids as little-endian int32.

    Raises:
        OverflowError: If an id does not fit 32 bits.
    """
    return _little_endian(array("i", token_ids)).tobytes()


def unpack_token_ids(packed: bytes) -> array[int]:
    """Reads little-endian int32 token ids.

    Raises:
        ModelCallInvalid: If the length is not a multiple of four bytes.
    """
    return _unpacked(array("i"), packed)


def pack_logprobs(logprobs: Iterable[float]) -> bytes:
    """Packs natural log-probabilities as little-endian float32, with rounding."""
    return _little_endian(array("f", logprobs)).tobytes()


def unpack_logprobs(packed: bytes) -> array[float]:
    """Reads little-endian float32 log-probabilities.

    Raises:
        ModelCallInvalid: If the length is not a multiple of four bytes.
    """
    return _unpacked(array("f"), packed)


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRange:
    """The policy version that sampled the tokens `start` (included) to `end` (excluded); version 0 is unknown."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCall:
    """A model call of an attempt, its arrays packed; slices of them are cheap and compare as bytes.

    Attributes:
        span_id: Id of the call's span, eight bytes; orders the calls of an attempt after `start_time_ns`.
        start_time_ns: Start, Unix nanoseconds.
        agent_name: Calling agent or role; empty for the only one.
        policy: The trainable policy; empty if its tokens are not trained on.
        prompt: Packed token ids of the whole prompt.
        completion: Packed ids of the sampled tokens.
        logprobs: Packed natural log-probabilities, one per sampled token.
        versions: Policy versions by range of completion tokens.
        temperature: Sampling temperature, unitless; None if unknown.
        request_json: The request, JSON.
        response_json: The answer, JSON.
        resend_count: How many times the client had sent the same request before.
        client_gone: Whether the client disconnected before it had the answer.
        parent_span_id: Parent of the call's span; empty if unknown.
        choice: Index of the choice in the answer, from 0.
        replayed: Id of the span, in a lost attempt, of the call that sampled the tokens, 16 hexadecimal digits; empty if
            this call did.
        routed_experts: Experts that computed tokens of prompt and completion; None if the engine does not report
            them.
    """

    span_id: bytes
    start_time_ns: int
    agent_name: str
    model: str
    policy: str
    prompt: bytes
    completion: bytes
    logprobs: bytes
    versions: tuple[VersionRange, ...]
    finish_reason: str
    usable: bool
    unusable_reason: str
    temperature: float | None
    request_json: bytes
    response_json: bytes
    resend_count: int = 0
    client_gone: bool = False
    parent_span_id: bytes = b""
    choice: int = 0
    replayed: str = ""
    routed_experts: RoutedExperts | None = None

    def __post_init__(self) -> None:
        """Checks the invariant of a usable call.

        Raises:
            ModelCallInvalid: If lengths differ, an array is truncated, or the versions do not cover the completion.
        """
        if not self.usable:
            return
        if any(len(packed) % ENTRY_BYTES for packed in (self.prompt, self.completion, self.logprobs)):
            raise ModelCallInvalid("A packed array is not a multiple of four bytes long.")
        if len(self.completion) != len(self.logprobs):
            raise ModelCallInvalid("Completion tokens and log-probabilities differ in number.")
        position = 0
        for versions in self.versions:
            if versions.start != position or versions.end < versions.start:
                raise ModelCallInvalid("The policy version ranges are not contiguous.")
            position = versions.end
        if self.versions and position != len(self.completion) // ENTRY_BYTES:
            raise ModelCallInvalid("The policy version ranges do not cover the completion.")


def read_model_call(record: SpanRecord, *, span: Span | None = None) -> ModelCall:
    """Reads a span with a captured model call.

    Args:
        record: The span as stored.
        span: The parsed `otlp_span`, if the caller has it.

    Raises:
        ModelCallInvalid: If the record is malformed, or marked as usable but inconsistent.
    """
    try:
        span = Span.FromString(record.otlp_span) if span is None else span
        call = ModelCallRecord.FromString(record.model_call)
    except DecodeError as error:
        raise ModelCallInvalid("A recorded model call cannot be decoded.") from error
    attributes = {}
    # Searching the bytes is many times faster than iterating over the attributes, and few spans have any of these.
    packed = record.otlp_span
    if _RESEND in packed or _GONE in packed or _CHOICE in packed or _REPLAYED in packed:
        attributes = {a.key: a.value for a in span.attributes if a.key in _READ_ATTRIBUTES}
    resend, gone = attributes.get(RESEND_COUNT_ATTRIBUTE), attributes.get(CLIENT_GONE_ATTRIBUTE)
    choice, replayed = attributes.get(CHOICE_ATTRIBUTE), attributes.get(REPLAYED_ATTRIBUTE)
    return ModelCall(
        span_id=span.span_id,
        start_time_ns=span.start_time_unix_nano,
        agent_name=call.agent_name,
        model=call.model,
        policy=call.policy,
        prompt=call.prompt_token_ids,
        completion=call.completion_token_ids,
        logprobs=call.completion_logprobs,
        versions=tuple(VersionRange(version=v.version, start=v.start, end=v.end) for v in call.policy_versions),
        finish_reason=call.finish_reason,
        usable=call.usable,
        unusable_reason=call.unusable_reason,
        temperature=call.temperature if call.HasField("temperature") else None,
        request_json=call.request_json,
        response_json=call.response_json,
        resend_count=resend.int_value if resend is not None else 0,
        client_gone=gone.bool_value if gone is not None else False,
        parent_span_id=span.parent_span_id,
        choice=choice.int_value if choice is not None else 0,
        replayed=replayed.string_value if replayed is not None else "",
        routed_experts=read_experts(call.routed_experts) if call.HasField("routed_experts") else None,
    )


def read_experts(packed: RoutedExpertsMessage) -> RoutedExperts:
    """Reads the experts of a recorded model call.

    Raises:
        ModelCallInvalid: If they are damaged.
    """
    first, size = packed.first_token, packed.layers * packed.top_k * packed.entry_bytes
    count = len(packed.experts) // size if size else 0
    try:
        return RoutedExperts(
            layers=packed.layers,
            top_k=packed.top_k,
            entry_bytes=packed.entry_bytes,
            spans=((first, first + count),) if count else (),
            packed=packed.experts,
        )
    except RoutedExpertsInvalid as error:
        raise ModelCallInvalid(str(error)) from error


def _unpacked(into: array[_T], packed: bytes) -> array[_T]:
    if len(packed) % ENTRY_BYTES:
        raise ModelCallInvalid("A packed array is not a multiple of four bytes long.")
    into.frombytes(packed)
    return _little_endian(into)


def _little_endian(values: array[_T]) -> array[_T]:
    if sys.byteorder == "big":
        values.byteswap()
    return values
