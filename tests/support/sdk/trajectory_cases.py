"""Attempts to build trajectories of: calls and spans as the proxy and agents write them, drawn or made by hand."""

from __future__ import annotations

import json
import struct
import uuid
from typing import Any

import zstandard
from hypothesis import strategies as st
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from fulmen.model_call import CLIENT_GONE_ATTRIBUTE, RESEND_COUNT_ATTRIBUTE, pack_logprobs, pack_token_ids
from fulmen.store.v1.span_pb2 import SpanBatch, SpanChunk, SpanCodec, SpanRecord
from fulmen.type.v1.model_call_pb2 import ModelCallRecord, PolicyVersionRange
from tests.support.sdk.trajectory_reference import PlainCall, PlainSpan

ATTEMPT = "projects/default/rollouts/01890000-0000-7000-8000-000000000001/attempts/1"
FIRST_SPAN = 101
token_ids = st.integers(0, 3)


def span_id(number: int) -> bytes:
    """Writes a small number as a span's id; 0 is none."""
    return struct.pack(">Q", number) if number else b""


def attribute(key: str, value: float | str | bool) -> KeyValue:
    """Makes an attribute."""
    kinds = {int: "int_value", float: "double_value", str: "string_value", bool: "bool_value"}
    held: dict[str, Any] = {kinds[type(value)]: value}
    return KeyValue(key=key, value=AnyValue(**held))


def record_of(call: PlainCall, index: int, *more: KeyValue, start: int | None = None) -> SpanRecord:
    """Writes a call as the proxy would."""
    span = Span(
        span_id=span_id(index + 1),
        parent_span_id=span_id(call.parent),
        start_time_unix_nano=1000 + (index if start is None else start),
        attributes=[attribute(RESEND_COUNT_ATTRIBUTE, call.resend_count), *more],
    )
    if call.gone:
        span.attributes.append(attribute(CLIENT_GONE_ATTRIBUTE, True))
    if call.lost:
        span.status.code = Status.STATUS_CODE_ERROR
        span.attributes.append(attribute("gen_ai.request.model", "m"))
        return SpanRecord(otlp_span=span.SerializeToString(), scope="fulmen.llm_proxy")
    record = ModelCallRecord(
        model="m",
        policy=call.policy,
        prompt_token_ids=pack_token_ids(call.prompt),
        completion_token_ids=pack_token_ids(call.completion),
        completion_logprobs=pack_logprobs(call.logprobs),
        policy_versions=[PolicyVersionRange(version=call.version, start=0, end=len(call.completion))],
        usable=call.usable,
        temperature=1.0,
        request_json=call.request.encode(),
        response_json=call.answer.encode(),
        agent_name=call.agent_name,
        finish_reason=call.finish_reason,
    )
    return SpanRecord(
        otlp_span=span.SerializeToString(), model_call=record.SerializeToString(), scope="fulmen.llm_proxy"
    )


def span_record(span: PlainSpan) -> SpanRecord:
    """Writes a span of the agent's own."""
    made = Span(span_id=span_id(span.id), parent_span_id=span_id(span.parent), start_time_unix_nano=500)
    made.attributes.append(attribute("note", "fulmen.step gen_ai.agent.name"))
    if span.agent:
        made.attributes.append(attribute("gen_ai.agent.name", span.agent))
    if span.step is not None:
        made.attributes.append(attribute("fulmen.step", span.step))
    return SpanRecord(otlp_span=made.SerializeToString(), scope="agent")


def records_of(calls: list[PlainCall], spans: list[PlainSpan]) -> list[SpanRecord]:
    """Writes a whole attempt."""
    return [record_of(call, index) for index, call in enumerate(calls)] + [span_record(span) for span in spans]


def chunk_of(records: list[SpanRecord], *, compressed: bool = False, attempt: str = ATTEMPT) -> SpanChunk:
    """Writes a chunk."""
    payload = SpanBatch(spans=records).SerializeToString()
    codec = SpanCodec.SPAN_CODEC_IDENTITY
    if compressed:
        payload, codec = zstandard.compress(payload), SpanCodec.SPAN_CODEC_ZSTD
    return SpanChunk(attempt=attempt, chunk_id=str(uuid.uuid4()), span_count=len(records), codec=codec, payload=payload)


def plain(prompt: list[int], completion: list[int], **more: Any) -> PlainCall:
    """Makes a call with some log-probabilities."""
    return PlainCall(
        prompt=prompt, completion=completion, logprobs=[-0.5 * (i + 1) for i in range(len(completion))],
        version=more.pop("version", 1), **more,
    )  # fmt: skip


@st.composite
def span_trees(draw: st.DrawFn, *, with_steps: bool) -> list[PlainSpan]:
    """Draws spans, some of which name agents and steps; a parent may be unknown, a later span, or the span itself."""
    count = draw(st.integers(0, 4))
    known = [0, 999, *range(FIRST_SPAN, FIRST_SPAN + count)]
    return [
        PlainSpan(
            id=FIRST_SPAN + index,
            parent=draw(st.sampled_from(known)),
            agent=draw(st.sampled_from(["", "", "planner", "critic", "fulmen.grader"])),
            step=draw(st.sampled_from([None, 0, 1, 2])) if with_steps else None,
        )
        for index in range(count)
    ]


@st.composite
def attempts(draw: st.DrawFn) -> tuple[list[PlainCall], list[PlainSpan]]:
    """Draws calls that continue, branch, restart, fail and are sent again, in any mixture, and the spans above them."""
    spans = draw(span_trees(with_steps=draw(st.booleans())))
    calls: list[PlainCall] = []
    for _ in range(draw(st.integers(1, 8))):
        before = draw(st.sampled_from([None, *calls]))
        if before is not None and draw(st.booleans()):
            prompt = before.prompt + before.completion + draw(st.lists(token_ids, max_size=3))
        else:
            prompt = draw(st.lists(token_ids, min_size=1, max_size=5))
        completion = draw(st.lists(token_ids, max_size=4))
        call = PlainCall(
            prompt=prompt,
            completion=completion,
            logprobs=[-float(draw(st.integers(0, 8))) / 4 for _ in completion],
            version=draw(st.integers(1, 3)),
            agent_name=draw(st.sampled_from(["", "", "critic"])),
            usable=draw(st.sampled_from([True, True, True, False])),
            resend_count=draw(st.sampled_from([0, 0, 0, 1, 2])),
            request=json.dumps({"n": draw(st.integers(0, 2))}),
            gone=draw(st.sampled_from([False, False, False, True])),
            lost=draw(st.sampled_from([False, False, False, False, True])),
            policy=draw(st.sampled_from(["p", "p", "p", ""])),
            parent=draw(st.sampled_from([0, 999, *(span.id for span in spans)])),
        )
        calls.append(call)
    return calls, spans
