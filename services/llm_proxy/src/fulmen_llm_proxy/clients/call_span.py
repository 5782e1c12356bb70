"""The slim OpenTelemetry span of a model call, without its tokens.

Invariant: whatever the agent asked for and the backend answered, a span comes out: a value that
does not fit its attribute is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from urllib.parse import urlsplit

import msgspec
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from fulmen.model_call import CLIENT_GONE_ATTRIBUTE, RESEND_COUNT_ATTRIBUTE
from fulmen_llm_proxy.clients import genai
from fulmen_llm_proxy.domain.apis.api import Api
from fulmen_llm_proxy.domain.apis.collected import Fields
from fulmen_llm_proxy.domain.call import CALLER_GONE, FinishedCall
from fulmen_llm_proxy.domain.capture import Captured
from fulmen_llm_proxy.domain.engines import Engine
from fulmen_llm_proxy.domain.routing import Backend
from fulmen_llm_proxy.domain.span_place import root_of

_INT64 = 1 << 63
_MAX_STOPS = 16
_REPEATED = 4096
_DEFAULT_PORTS = {"http": 80, "https": 443}


class Sampling(msgspec.Struct):
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
    """Where answers and their first events say who they are: at the top, or one below (Anthropic, responses)."""

    id: str | None = None
    model: str | None = None
    message: _Named | None = None
    response: _Named | None = None


_ENCODER = msgspec.json.Encoder()
_SAMPLING = msgspec.json.Decoder(Sampling)
_SAMPLING_FIELDS = frozenset(Sampling.__struct_fields__)
_TALK = msgspec.json.Decoder(_Talk)
_ANSWER = msgspec.json.Decoder(_Answer)
_TEXT_OR_NULL = msgspec.json.Decoder(str | None)


def sampling_of(fields: Fields) -> Sampling:
    """Reads the sampling of a request; a field of a wrong type counts as absent.

    The backend has refused such a request, or knows more than we do.
    """
    chosen = {key: value for key, value in fields.items() if key in _SAMPLING_FIELDS}
    try:
        return _SAMPLING.decode(_ENCODER.encode(chosen))
    except ValueError:
        return _SAMPLING.decode(_ENCODER.encode({key: value for key, value in chosen.items() if _fits(key, value)}))


def _fits(key: str, value: msgspec.Raw) -> bool:
    try:
        _SAMPLING.decode(_ENCODER.encode({key: value}))
    except ValueError:
        return False
    return True


def span_of(call: FinishedCall, captured: Captured | None, sampling: Sampling) -> Span:
    """Returns the span of a call; `captured` is None if no answer came."""
    place = call.place
    attributes = _circumstances(call)
    attributes += _request_attributes(call, sampling)
    if captured is not None:
        attributes += _answer_attributes(call, captured)
    # What is not served may have any name of any length: only names that routes have are remembered.
    repeated = _made if call.backend is None else _repeated
    span = Span.FromString(repeated(call.api, call.model, call.attribution.mode, call.backend, call.http_status))
    span.trace_id = bytes.fromhex(place.trace_id)
    span.span_id = bytes.fromhex(place.span_id)
    span.parent_span_id = bytes.fromhex(place.parent_id or root_of(call.attribution.attempt))
    span.start_time_unix_nano = call.start_ns
    span.end_time_unix_nano = call.end_ns
    span.attributes.extend(attributes)
    if call.error_type:
        span.status.CopyFrom(Status(code=Status.STATUS_CODE_ERROR, message=_clean(call.error_type)))
    return span


def number(key: str, value: int) -> list[KeyValue]:
    """Returns an attribute; none if the number is larger than an attribute can be."""
    if -_INT64 <= value < _INT64:
        return [KeyValue(key=key, value=AnyValue(int_value=value))]
    return []


def _made(api: Api, model: str, mode: str, backend: Backend | None, http_status: int) -> bytes:
    """Returns what is the same in the spans of many calls, serialised."""
    attributes = [
        _text(genai.OPERATION, api.operation),
        _text(genai.PROVIDER, _provider(api, backend)),
        _text(genai.REQUEST_MODEL, model),
        _text("fulmen.mode", mode),
        *number(genai.HTTP_STATUS, http_status),
    ]
    if backend is not None:
        address, port = _server(backend.base_url)
        attributes += [
            _text("fulmen.backend", backend.id),
            _text(genai.SERVER_ADDRESS, address),
            *number(genai.SERVER_PORT, port),
        ]
    name = _clean(f"{api.operation} {model}")
    return Span(name=name, kind=Span.SPAN_KIND_CLIENT, attributes=attributes).SerializeToString()


_repeated = lru_cache(maxsize=_REPEATED)(_made)  # making it anew would be half of the cost of a span


def _circumstances(call: FinishedCall) -> list[KeyValue]:
    found = number("fulmen.attempt.epoch", call.attribution.epoch)
    if call.agent_name:
        found.append(_text(genai.AGENT_NAME, call.agent_name))
    if call.resend_count:
        found += number(RESEND_COUNT_ATTRIBUTE, call.resend_count)
    if call.error_type:
        found.append(_text(genai.ERROR_TYPE, call.error_type))
    if call.error_type == CALLER_GONE:
        found.append(KeyValue(key=CLIENT_GONE_ATTRIBUTE, value=AnyValue(bool_value=True)))
    if call.first_byte_s is not None:
        found.append(_real(genai.RESPONSE_FIRST_CHUNK_S, call.first_byte_s))
    return found


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


def _request_attributes(call: FinishedCall, sampling: Sampling) -> list[KeyValue]:
    found: list[KeyValue] = []
    if call.stream:
        found.append(KeyValue(key=genai.REQUEST_STREAM, value=AnyValue(bool_value=True)))
    for key, real in (
        (genai.REQUEST_TEMPERATURE, sampling.temperature),
        (genai.REQUEST_TOP_P, sampling.top_p),
        (genai.REQUEST_TOP_K, sampling.top_k),
        (genai.REQUEST_FREQUENCY_PENALTY, sampling.frequency_penalty),
        (genai.REQUEST_PRESENCE_PENALTY, sampling.presence_penalty),
    ):
        if real is not None:
            found.append(_real(key, real))
    limit = sampling.max_completion_tokens or sampling.max_tokens or sampling.max_output_tokens
    if limit is not None:
        found += number(genai.REQUEST_MAX_TOKENS, limit)
    if sampling.seed is not None:
        found += number(genai.REQUEST_SEED, sampling.seed)
    if sampling.n is not None and sampling.n != 1:
        found += number(genai.REQUEST_CHOICES, sampling.n)
    stops = sampling.stop if sampling.stop_sequences is None else sampling.stop_sequences
    if stops:
        found.append(_texts(genai.REQUEST_STOP, [stops] if isinstance(stops, str) else stops[:_MAX_STOPS]))
    conversation = _conversation(call.fields)
    if conversation:
        found.append(_text(genai.CONVERSATION, conversation))
    return found


def _conversation(fields: Fields) -> str:
    raw = fields.get("conversation")
    if raw is None:
        return ""
    try:
        said = _TALK.decode(_ENCODER.encode({"conversation": raw})).conversation
    except ValueError:
        return ""
    return said.id if isinstance(said, _Conversation) else said or ""


def _answer_attributes(call: FinishedCall, captured: Captured) -> list[KeyValue]:
    found: list[KeyValue] = []
    named = _named(call)
    if named.id:
        found.append(_text(genai.RESPONSE_ID, named.id))
    model = named.model or ("" if call.target is None else call.target.model)
    if model:
        found.append(_text(genai.RESPONSE_MODEL, model))
    reasons = [choice.finish_reason for choice in captured.choices if choice.finish_reason]
    if reasons:
        found.append(_texts(genai.RESPONSE_FINISH_REASONS, reasons))
    usage = captured.usage
    if usage.prompt is not None:
        found += number(genai.USAGE_INPUT, usage.prompt)
    if usage.completion is not None:
        found += number(genai.USAGE_OUTPUT, usage.completion)
    if usage.cached:
        found += number(genai.USAGE_CACHE_READ, usage.cached)
    if usage.cache_written:
        found += number(genai.USAGE_CACHE_CREATION, usage.cache_written)
    if usage.reasoning:
        found += number(genai.USAGE_REASONING, usage.reasoning)
    return found


def _named(call: FinishedCall) -> _Named:
    if call.collected is None or not call.collected.payloads:
        return _Named()
    try:
        if call.collected.named is not None:
            answer_id, model = call.collected.named
            return _Named(id=_text_of(answer_id), model=_text_of(model))
        answer = _ANSWER.decode(call.collected.payloads[0])
    except ValueError:
        return _Named()
    inner = answer.message or answer.response or _Named()
    return _Named(id=answer.id or inner.id, model=answer.model or inner.model)


def _text_of(raw: msgspec.Raw | None) -> str | None:
    return None if raw is None else _TEXT_OR_NULL.decode(raw)


def _clean(text: str) -> str:
    """Returns text that UTF-8 can carry."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def _text(key: str, value: str) -> KeyValue:
    return KeyValue(key=key, value=AnyValue(string_value=_clean(value)))


def _texts(key: str, values: Sequence[str]) -> KeyValue:
    array = ArrayValue(values=[AnyValue(string_value=_clean(value)) for value in values])
    return KeyValue(key=key, value=AnyValue(array_value=array))


def _real(key: str, value: float) -> KeyValue:
    return KeyValue(key=key, value=AnyValue(double_value=value))
