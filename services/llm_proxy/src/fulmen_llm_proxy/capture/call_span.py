"""Builds the slim OpenTelemetry span of a model call, without its tokens.

Invariant: every request and answer yields a span; a value that does not fit its attribute is omitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from urllib.parse import urlsplit

import msgspec
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from fulmen.ids import span_id_of
from fulmen.model_call import CLIENT_GONE_ATTRIBUTE, REPLAYED_ATTRIBUTE, RESEND_COUNT_ATTRIBUTE
from fulmen_llm_proxy.apis.api import UNREADABLE, Api
from fulmen_llm_proxy.apis.collected import Fields
from fulmen_llm_proxy.apis.errors import UNSEEN
from fulmen_llm_proxy.capture import genai
from fulmen_llm_proxy.capture.decode import Captured
from fulmen_llm_proxy.capture.finished_call import FinishedCall
from fulmen_llm_proxy.routing.engines import Engine
from fulmen_llm_proxy.routing.table import Backend

_INT64 = 1 << 63
_MAX_STOPS = 16
_REPEATED = 4096
_DEFAULT_PORTS = {"http": 80, "https": 443}


class Sampling(msgspec.Struct, frozen=True):
    """The sampling fields of a request, under the names of any API."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: float | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    max_output_tokens: int | None = None
    seed: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stop_sequences: list[str] | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None


class _Conversation(msgspec.Struct):
    id: str = ""


class _Talk(msgspec.Struct):
    conversation: str | _Conversation | None = None


class _Named(msgspec.Struct):
    id: str | None = None
    model: str | None = None


class _Answer(msgspec.Struct):
    """Id and model of an answer or its first event: at the top level, or one below (Messages, Responses)."""

    id: str | None = None
    model: str | None = None
    message: _Named | None = None
    response: _Named | None = None


_ENCODER = msgspec.json.Encoder()
_SAMPLING = msgspec.json.Decoder(Sampling)
_SAMPLING_FIELDS = frozenset(Sampling.__struct_fields__)
_UNSET = Sampling()
_TALK = msgspec.json.Decoder(_Talk)
_ANSWER = msgspec.json.Decoder(_Answer)
_TEXT_OR_NULL = msgspec.json.Decoder(str | None)


def sampling_of(fields: Fields) -> Sampling:
    """Reads the sampling fields of a request; a field of a wrong type counts as absent."""
    chosen = {key: value for key, value in fields.items() if key in _SAMPLING_FIELDS}
    if not chosen:
        return _UNSET
    try:
        return _SAMPLING.decode(_ENCODER.encode(chosen))
    except UNREADABLE:
        return _SAMPLING.decode(_ENCODER.encode({key: value for key, value in chosen.items() if _fits(key, value)}))


def _fits(key: str, value: msgspec.Raw) -> bool:
    try:
        _SAMPLING.decode(_ENCODER.encode({key: value}))
    except UNREADABLE:
        return False
    return True


def span_of(call: FinishedCall, captured: Captured | None, sampling: Sampling) -> Span:
    """Returns the span of a call; `captured` is None without an answer."""
    place = call.place
    # Unserved models may have names of any length; only names of routes are cached.
    repeated = _made if call.backend is None else _repeated
    span = Span.FromString(repeated(call.api, call.model, call.attribution.mode, call.backend, call.http_status))
    span.trace_id = bytes.fromhex(place.trace_id)
    span.span_id = bytes.fromhex(place.span_id)
    span.parent_span_id = bytes.fromhex(place.parent_id or span_id_of(call.attribution.attempt))
    span.start_time_unix_nano = call.start_ns
    span.end_time_unix_nano = call.end_ns
    _add_circumstances(span, call)
    _add_request(span, call, sampling)
    if captured is not None:
        _add_answer(span, call, captured)
    if call.error_type:
        span.status.CopyFrom(Status(code=Status.STATUS_CODE_ERROR, message=clean(call.error_type)))
    return span


def add_number(span: Span, key: str, value: int) -> None:
    """Adds an integer attribute unless it exceeds 64 bits."""
    if -_INT64 <= value < _INT64:
        _new(span, key).int_value = value


def add_real(span: Span, key: str, value: float) -> None:
    """Adds a float attribute."""
    _new(span, key).double_value = value


def _made(api: Api, model: str, mode: str, backend: Backend | None, http_status: int) -> bytes:
    """Returns the serialised part that is the same in the spans of many calls."""
    span = Span(name=clean(f"{api.operation} {model}"), kind=Span.SPAN_KIND_CLIENT)
    _add_text(span, genai.OPERATION, api.operation)
    _add_text(span, genai.PROVIDER, _provider(api, backend))
    _add_text(span, genai.REQUEST_MODEL, model)
    _add_text(span, "fulmen.mode", mode)
    add_number(span, genai.HTTP_STATUS, http_status)
    if backend is not None:
        address, port = _server(backend.base_url)
        _add_text(span, "fulmen.backend", backend.id)
        _add_text(span, genai.SERVER_ADDRESS, address)
        add_number(span, genai.SERVER_PORT, port)
    return span.SerializeToString()


_repeated = lru_cache(maxsize=_REPEATED)(_made)  # rebuilding it would be half the cost of a span


def _add_circumstances(span: Span, call: FinishedCall) -> None:
    add_number(span, "fulmen.attempt.epoch", call.attribution.epoch)
    if call.agent_name:
        _add_text(span, genai.AGENT_NAME, call.agent_name)
    if call.resend_count:
        add_number(span, RESEND_COUNT_ATTRIBUTE, call.resend_count)
    if call.replayed_span:
        _add_text(span, REPLAYED_ATTRIBUTE, call.replayed_span)
    if call.error_type:
        _add_text(span, genai.ERROR_TYPE, call.error_type)
    if call.error_type in UNSEEN:
        _new(span, CLIENT_GONE_ATTRIBUTE).bool_value = True
    if call.first_byte_s is not None:
        add_real(span, genai.RESPONSE_FIRST_CHUNK_S, call.first_byte_s)


def _provider(api: Api, backend: Backend | None) -> str:
    if backend is None:
        return api.dialect.value
    if backend.azure:
        return genai.PROVIDER_AZURE
    return (backend.dialect if backend.engine is Engine.UNKNOWN else backend.engine).value


def _server(base_url: str) -> tuple[str, int]:
    parts = urlsplit(base_url)
    try:
        port = parts.port
    except ValueError:
        port = None
    return parts.hostname or "", port or _DEFAULT_PORTS.get(parts.scheme, 0)


def _add_request(span: Span, call: FinishedCall, sampling: Sampling) -> None:
    if call.stream:
        _new(span, genai.REQUEST_STREAM).bool_value = True
    for key, real in (
        (genai.REQUEST_TEMPERATURE, sampling.temperature),
        (genai.REQUEST_TOP_P, sampling.top_p),
        (genai.REQUEST_TOP_K, sampling.top_k),
        (genai.REQUEST_FREQUENCY_PENALTY, sampling.frequency_penalty),
        (genai.REQUEST_PRESENCE_PENALTY, sampling.presence_penalty),
    ):
        if real is not None:
            add_real(span, key, real)
    limit = sampling.max_completion_tokens or sampling.max_tokens or sampling.max_output_tokens
    if limit is not None:
        add_number(span, genai.REQUEST_MAX_TOKENS, limit)
    if sampling.seed is not None:
        add_number(span, genai.REQUEST_SEED, sampling.seed)
    if sampling.n is not None and sampling.n != 1:
        add_number(span, genai.REQUEST_CHOICES, sampling.n)
    stops = sampling.stop if sampling.stop_sequences is None else sampling.stop_sequences
    if stops:
        _add_texts(span, genai.REQUEST_STOP, [stops] if isinstance(stops, str) else stops[:_MAX_STOPS])
    conversation = _conversation(call.fields)
    if conversation:
        _add_text(span, genai.CONVERSATION, conversation)


def _conversation(fields: Fields) -> str:
    raw = fields.get("conversation")
    if raw is None:
        return ""
    try:
        said = _TALK.decode(_ENCODER.encode({"conversation": raw})).conversation
    except UNREADABLE:
        return ""
    return said.id if isinstance(said, _Conversation) else said or ""


def _add_answer(span: Span, call: FinishedCall, captured: Captured) -> None:
    named = _named(call)
    if named.id:
        _add_text(span, genai.RESPONSE_ID, named.id)
    model = named.model or ("" if call.target is None else call.target.model)
    if model:
        _add_text(span, genai.RESPONSE_MODEL, model)
    reasons = [choice.finish_reason for choice in captured.choices if choice.finish_reason]
    if reasons:
        _add_texts(span, genai.RESPONSE_FINISH_REASONS, reasons)
    usage = captured.usage
    if usage.prompt is not None:
        add_number(span, genai.USAGE_INPUT, usage.prompt)
    if usage.completion is not None:
        add_number(span, genai.USAGE_OUTPUT, usage.completion)
    if usage.cached:
        add_number(span, genai.USAGE_CACHE_READ, usage.cached)
    if usage.cache_written:
        add_number(span, genai.USAGE_CACHE_CREATION, usage.cache_written)
    if usage.reasoning:
        add_number(span, genai.USAGE_REASONING, usage.reasoning)


def _named(call: FinishedCall) -> _Named:
    if call.collected is None or not call.collected.payloads:
        return _Named()
    try:
        if call.collected.named is not None:
            answer_id, model = call.collected.named
            return _Named(id=_text_of(answer_id), model=_text_of(model))
        answer = _ANSWER.decode(call.collected.payloads[0])
    except UNREADABLE:
        return _Named()
    inner = answer.message or answer.response or _Named()
    return _Named(id=answer.id or inner.id, model=answer.model or inner.model)


def _text_of(raw: msgspec.Raw | None) -> str | None:
    return None if raw is None else _TEXT_OR_NULL.decode(raw)


def clean(text: str) -> str:
    """Returns text that can be encoded as UTF-8."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def _new(span: Span, key: str) -> AnyValue:
    """Adds an attribute and returns its value to be set; in place, this costs a third of appending a message."""
    attribute = span.attributes.add()
    attribute.key = key
    return attribute.value


def _add_text(span: Span, key: str, value: str) -> None:
    _new(span, key).string_value = clean(value)


def _add_texts(span: Span, key: str, values: Sequence[str]) -> None:
    texts = _new(span, key).array_value.values
    for value in values:
        texts.add().string_value = clean(value)
