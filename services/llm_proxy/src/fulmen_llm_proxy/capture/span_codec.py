"""Encodes finished calls for the store: a slim OpenTelemetry span, and a packed `ModelCallRecord` beside it."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator

import msgspec
import msgspec.structs
import structlog
import zstandard
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from fulmen.ids import uuid7
from fulmen.model_call import COST_ATTRIBUTE
from fulmen.routed_experts import RoutedExperts
from fulmen.store.v1 import span_pb2
from fulmen.type.v1 import model_call_pb2
from fulmen_llm_proxy.apis.assembly import whole_of
from fulmen_llm_proxy.apis.collected import Collected
from fulmen_llm_proxy.capture.call_span import Sampling, add_number, add_real, sampling_of, span_of
from fulmen_llm_proxy.capture.decode import Captured, CapturedChoice, decode_capture
from fulmen_llm_proxy.capture.finished_call import FinishedCall
from fulmen_llm_proxy.capture.packed import PackedCalls
from fulmen_llm_proxy.limits.prices import NO_PRICES, PriceTable

SCOPE = "fulmen.llm_proxy"
MAX_PAYLOAD_BYTES = 2 * 1024 * 1024
"""The store's limit of one chunk's payload."""

_COMPRESS_FROM_BYTES = 2048
_MAX_SPANS = 4096
_OUTLINE_BYTES = 64
"""Overhead of a span record: tags, lengths, the name of the scope."""
_TOKEN_IDS_NOT_ASKED = "backend_returns_no_token_ids"  # noqa: S105 - tokens of a model


_STRANGE = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError, struct.error)
"""Exceptions that parsing unforeseen foreign JSON may raise."""

_MALFORMED = Collected(malformed=True, complete=True)
_ENCODER = msgspec.json.Encoder()
_log = structlog.get_logger(__name__)


class EncodedCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call encoded as spans, and its counts for the attempt's ledger."""

    attempt: str
    spans: tuple[span_pb2.SpanRecord, ...]
    start_ns: int
    end_ns: int
    usable: bool
    captured: bool
    trainable: bool
    prompt_tokens: int
    completion_tokens: int


class SpanCodec:
    """Encodes finished calls under the proxy's identity."""

    def __init__(self, *, instance_id: str, prices: PriceTable = NO_PRICES) -> None:
        """Sets the id of this process, and the prices of tokens."""
        self._prices = prices
        resource = Resource(
            attributes=[
                KeyValue(key=key, value=AnyValue(string_value=value))
                for key, value in (("service.name", "fulmen-llm-proxy"), ("service.instance.id", instance_id))
            ]
        )
        self._resource = resource.SerializeToString()
        self._compressor = zstandard.ZstdCompressor(level=1)
        self._last_id = 0

    def encode(self, call: FinishedCall) -> EncodedCall:
        """Encodes a call: a span per choice of its answer, or a single one without an answer.

        A call that cannot be encoded is recorded as malformed, so that it does not block the others.
        """
        try:
            return self._encode(call)
        except _STRANGE as error:
            _log.error("call_not_encoded", attempt=call.attribution.attempt, error=type(error).__name__)
            return self._encode(
                msgspec.structs.replace(call, fields={}, collected=_MALFORMED if call.collected else None)
            )

    def _encode(self, call: FinishedCall) -> EncodedCall:
        trainable = call.target is not None and bool(call.target.policy) and call.api.generates
        captured = None
        if call.collected is not None:
            version = 0 if call.target is None else call.target.policy_version
            captured = decode_capture(call.collected, default_version=version)
        sampling = sampling_of(call.fields)
        span = span_of(call, captured, sampling)
        self._add_cost(span, call, captured)
        if captured is None or not trainable:
            spans = [self._record(span, b"")]
            usable = True
        else:
            flaws = ", ".join(captured.flaws) if call.captured else _TOKEN_IDS_NOT_ASKED
            spans = self._with_records(call, span, captured, sampling, flaws)
            usable = not flaws
        usage = captured.usage if captured is not None else None
        return EncodedCall(
            attempt=call.attribution.attempt,
            spans=tuple(spans),
            start_ns=call.start_ns,
            end_ns=call.end_ns,
            usable=usable,
            captured=captured is not None and trainable,
            trainable=captured is not None and trainable and usable,
            prompt_tokens=(usage.prompt or 0) if usage else 0,
            completion_tokens=(usage.completion or 0) if usage else 0,
        )

    def pack(self, calls: list[EncodedCall]) -> list[PackedCalls]:
        """Packs calls into chunks of one attempt each, within the store's limits.

        Trainable and other calls are never in the same chunk, so that the latter can be dropped alone. The chunks of an
        attempt are in the order of its calls, and their ids increase.
        """
        grouped: dict[str, list[EncodedCall]] = {}
        for call in calls:
            grouped.setdefault(call.attempt, []).append(call)
        return [packed for attempt, of_attempt in grouped.items() for packed in self._packed(attempt, of_attempt)]

    def _packed(self, attempt: str, calls: list[EncodedCall]) -> Iterator[PackedCalls]:
        records: list[span_pb2.SpanRecord] = []
        ended: list[EncodedCall] = []
        times: list[int] = []
        size_bytes, trainable = 0, calls[0].trainable
        for call in calls:
            for record in call.spans:
                record_bytes = (
                    len(record.otlp_span) + len(record.model_call) + len(record.otlp_resource) + _OUTLINE_BYTES
                )
                full = size_bytes + record_bytes > MAX_PAYLOAD_BYTES or len(records) == _MAX_SPANS
                if records and (full or call.trainable != trainable):
                    yield self._chunk(attempt, records, ended, times, trainable=trainable)
                    records, ended, times, size_bytes = [], [], [], 0
                trainable = call.trainable
                records.append(record)
                size_bytes += record_bytes
                times += (call.start_ns, call.end_ns)
            ended.append(call)
        yield self._chunk(attempt, records, ended, times, trainable=trainable)

    def _chunk(
        self,
        attempt: str,
        records: list[span_pb2.SpanRecord],
        ended: list[EncodedCall],
        times: list[int],
        *,
        trainable: bool,
    ) -> PackedCalls:
        payload = span_pb2.SpanBatch(spans=records).SerializeToString()
        codec = span_pb2.SPAN_CODEC_IDENTITY
        if len(payload) >= _COMPRESS_FROM_BYTES:
            payload, codec = self._compressor.compress(payload), span_pb2.SPAN_CODEC_ZSTD
        # Ids increase even within a millisecond: the store returns the chunks of a rollout in this order.
        self._last_id = max(uuid7().int, self._last_id + 1)
        chunk = span_pb2.SpanChunk(
            attempt=attempt,
            chunk_id=_name_of(self._last_id),
            span_count=len(records),
            codec=codec,
            payload=payload,
        )
        chunk.start_time.FromNanoseconds(min(times))
        chunk.end_time.FromNanoseconds(max(times))
        return PackedCalls(
            attempt=attempt,
            chunk_id=chunk.chunk_id,
            chunk=chunk.SerializeToString(),
            calls=len(ended),
            unusable=sum(not call.usable for call in ended),
            captured=sum(call.captured for call in ended),
            prompt_tokens=sum(call.prompt_tokens for call in ended),
            completion_tokens=sum(call.completion_tokens for call in ended),
            trainable=trainable,
        )

    def _add_cost(self, span: Span, call: FinishedCall, captured: Captured | None) -> None:
        if captured is None or call.target is None or captured.usage.prompt is None or call.replayed_span:
            return
        price = self._prices.of(call.target.backend_id, call.target.model)
        if price is not None:
            cost_usd = price.cost_micros(captured.usage) / 1e6
            add_real(span, COST_ATTRIBUTE, cost_usd)

    def _record(self, span: Span, model_call: bytes) -> span_pb2.SpanRecord:
        return span_pb2.SpanRecord(
            otlp_span=span.SerializeToString(), model_call=model_call, scope=SCOPE, otlp_resource=self._resource
        )

    def _with_records(
        self, call: FinishedCall, span: Span, captured: Captured, sampling: Sampling, flaws: str
    ) -> list[span_pb2.SpanRecord]:
        choices = captured.choices or (
            CapturedChoice(index=0, token_ids=b"", logprobs=b"", finish_reason="", versions=()),
        )
        request_json, response_json = _ENCODER.encode(call.fields), _answer_json(call)
        records = []
        for choice in choices:
            record = _model_call(call, captured, choice, sampling, flaws)
            record.request_json, record.response_json = request_json, response_json
            own = span
            if choice.index != choices[0].index:
                own = Span()
                own.CopyFrom(span)
                own.span_id = os.urandom(8)
                add_number(own, "fulmen.choice", choice.index)
            packed = record.SerializeToString()
            if len(packed) > MAX_PAYLOAD_BYTES // 2:
                # Training needs only the token ids; the texts would make the chunk too large.
                record.ClearField("request_json")
                record.ClearField("response_json")
                record.ClearField("completion_token_text")
                record.ClearField("completion_token_sizes")
                packed = record.SerializeToString()
            records.append(self._record(own, packed))
        return records


def _name_of(chunk_id: int) -> str:
    """Writes a UUID; an object would cost three times as much."""
    digits = f"{chunk_id:032x}"
    return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"


def _answer_json(call: FinishedCall) -> bytes:
    collected = call.collected
    if collected is None or not collected.payloads:
        return b""
    if collected.streamed:
        return call.api.assemble(collected.payloads)
    return whole_of(collected.payloads[0], was_read=not collected.malformed)


def _model_call(
    call: FinishedCall, captured: Captured, choice: CapturedChoice, sampling: Sampling, flaws: str
) -> model_call_pb2.ModelCallRecord:
    record = model_call_pb2.ModelCallRecord(
        model=call.model,
        policy="" if call.target is None else call.target.policy,
        prompt_token_ids=choice.prompt_ids or captured.prompt_ids,
        completion_token_ids=choice.token_ids,
        completion_logprobs=choice.logprobs,
        policy_versions=[
            model_call_pb2.PolicyVersionRange(version=part.version, start=part.start, end=part.end)
            for part in choice.versions
        ],
        finish_reason=choice.finish_reason,
        usable=not flaws,
        unusable_reason=flaws,
        agent_name=call.agent_name,
        completion_token_text=choice.text,
        completion_token_sizes=choice.text_sizes,
    )
    if sampling.temperature is not None:
        record.temperature = sampling.temperature
    if choice.experts is not None:
        record.routed_experts.CopyFrom(_packed_experts(choice.experts))
    return record


def _packed_experts(experts: RoutedExperts) -> model_call_pb2.RoutedExperts:
    return model_call_pb2.RoutedExperts(
        layers=experts.layers,
        top_k=experts.top_k,
        entry_bytes=experts.entry_bytes,
        first_token=experts.spans[0][0] if experts.spans else 0,
        experts=experts.packed,
    )
