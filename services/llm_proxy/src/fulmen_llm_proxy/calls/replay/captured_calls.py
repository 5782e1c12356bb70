"""Captured calls of lost attempts, as answers to the calls that an agent repeats.

Invariant: an answer has the token ids, log-probabilities, policy versions and texts of the capture, so that the capture of the
repeated call has the same ones, bit for bit. Only complete calls that may be trained on are kept: what an agent saw of
others is unknown.
"""

from __future__ import annotations

import base64
import hashlib
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from google.protobuf.message import DecodeError
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from fulmen.model_call import (
    CHOICE_ATTRIBUTE,
    CLIENT_GONE_ATTRIBUTE,
    ENTRY_BYTES,
    REPLAYED_ATTRIBUTE,
    ModelCallInvalid,
    read_experts,
    unpack_logprobs,
    unpack_token_ids,
)
from fulmen.routed_experts import write_npy
from fulmen.store.v1.span_pb2 import SpanRecord
from fulmen.type.v1.model_call_pb2 import ModelCallRecord, RoutedExperts
from fulmen_llm_proxy.apis.api import UNREADABLE
from fulmen_llm_proxy.apis.collected import Fields
from fulmen_llm_proxy.calls.answer_cache import IGNORED_FIELDS

_NOT_COMPARED: Final = IGNORED_FIELDS | {"model", "stream", "stream_options"}
"""Fields that change no token. The model is compared by its public name: the backend's may change with its versions."""
_OVERHEAD_BYTES: Final = 512
_sorted_json = msgspec.json.Encoder(order="sorted").encode
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(dict[str, Any]).decode
_fields_of = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def request_digest(model: str, fields: Fields) -> bytes | None:
    """Returns the digest of a request to a backend; None if it is not readable.

    Args:
        model: public name of the model.
        fields: its fields, without those that were added for the capture.
    """
    try:
        values = {name: msgspec.json.decode(raw) for name, raw in fields.items() if name not in _NOT_COMPARED}
        # Writing needs a little more depth than reading did.
        canonical = _sorted_json([model, values])
    except UNREADABLE:
        return None
    return hashlib.blake2b(canonical, digest_size=16).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedCall:
    """A captured call.

    Attributes:
        span_id: id of the span of the call that sampled its tokens, 16 hexadecimal digits.
        digest: Digest of its request.
        was_seen: whether the agent received the answer.
        choices: the records of its choices by index, without their requests.
        size_bytes: approximate memory.
    """

    span_id: str
    digest: bytes
    policy: str
    was_seen: bool
    choices: Mapping[int, ModelCallRecord]
    size_bytes: int

    @property
    def token_count(self) -> int:
        """Number of sampled tokens."""
        return sum(len(choice.completion_token_ids) for choice in self.choices.values()) // ENTRY_BYTES

    def versions(self) -> dict[int, msgspec.Raw]:
        """Returns the policy versions of the tokens by choice, as a backend reports them, JSON."""
        return {
            index: msgspec.Raw(
                _encode(
                    [{"version": part.version, "start": part.start, "end": part.end} for part in each.policy_versions]
                )
            )
            for index, each in self.choices.items()
        }

    def answer(self) -> bytes:
        """Returns the answer as a backend would give it that reports no policy versions, JSON.

        Raises:
            msgspec.DecodeError, UnicodeDecodeError, RecursionError: `UNREADABLE`, if the record is damaged.
        """
        response = _decode(self.choices[min(self.choices)].response_json)
        for choice in response["choices"]:
            record = self.choices[choice.get("index", 0)]
            choice["token_ids"] = unpack_token_ids(record.completion_token_ids).tolist()
            choice["prompt_token_ids"] = unpack_token_ids(record.prompt_token_ids).tolist()
            if not choice.get("logprobs"):
                choice["logprobs"] = _logprobs(record, of_chat="message" in choice)
            if record.HasField("routed_experts") and (experts := _experts(record.routed_experts)):
                choice["routed_experts"] = experts
        if not response.get("usage"):
            prompt, completion = len(self.choices[0].prompt_token_ids) // ENTRY_BYTES, self.token_count
            response["usage"] = {
                "prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion
            }  # fmt: skip
        return _encode(response)


def _experts(packed: RoutedExperts) -> str:
    """Returns a record as an engine reports it; empty if its oldest tokens were left out, or it is damaged."""
    if packed.first_token:
        return ""
    try:
        return base64.b64encode(write_npy(read_experts(packed))).decode()
    except ModelCallInvalid:
        return ""


def _logprobs(record: ModelCallRecord, *, of_chat: bool) -> dict[str, Any]:
    """Returns the log-probabilities and texts of tokens in the form of an API."""
    values = unpack_logprobs(record.completion_logprobs).tolist()
    texts, begin = [], 0
    for size in record.completion_token_sizes or [0] * len(values):
        texts.append(record.completion_token_text[begin : begin + size])
        begin += size
    tokens = [text.decode(errors="replace") for text in texts]
    if not of_chat:
        return {"tokens": tokens, "token_logprobs": values}
    return {
        "content": [
            {"token": token, "logprob": value, "bytes": list(text), "top_logprobs": []}
            for token, value, text in zip(tokens, values, texts, strict=True)
        ]
    }


@dataclass(slots=True, kw_only=True)
class CapturedAttempt:
    """The captured calls of one attempt, in order of start.

    Attributes:
        has_sampled: whether one of its calls was answered by a backend.
        replayed: ids of the spans whose calls were answered again.
    """

    calls: list[CapturedCall]
    has_sampled: bool
    replayed: set[str]


def captured_attempt(records: Iterable[tuple[SpanRecord, Span]]) -> CapturedAttempt:
    """Reads the captured calls among the spans of one attempt; damaged ones are left out."""
    found: dict[bytes, _Parts] = {}
    by_request: dict[tuple[int, bytes], _Parts] = {}
    has_sampled, replayed = False, set[str]()
    for record, span in sorted(records, key=lambda pair: (pair[1].start_time_unix_nano, pair[1].span_id)):
        if not record.model_call or span.span_id in found:
            continue
        try:
            call = ModelCallRecord.FromString(record.model_call)
        except DecodeError:
            continue
        attributes = {attribute.key: attribute.value for attribute in span.attributes}
        original = attributes[REPLAYED_ATTRIBUTE].string_value if REPLAYED_ATTRIBUTE in attributes else ""
        has_sampled = has_sampled or not original
        replayed |= {original} - {""}
        index = attributes[CHOICE_ATTRIBUTE].int_value if CHOICE_ATTRIBUTE in attributes else 0
        parts = by_request.setdefault(
            (span.start_time_unix_nano, call.request_json),
            _Parts(span_id=original or span.span_id.hex(), gone=CLIENT_GONE_ATTRIBUTE in attributes, choices={}),
        )
        parts.choices[index] = call
        found[span.span_id] = parts
    calls = [call for parts in by_request.values() if (call := parts.call()) is not None]
    return CapturedAttempt(calls=calls, has_sampled=has_sampled, replayed=replayed)


@dataclass(slots=True, kw_only=True)
class _Parts:
    """The records of one call; its choices have spans of their own."""

    span_id: str
    gone: bool
    choices: dict[int, ModelCallRecord]

    def call(self) -> CapturedCall | None:
        """Returns the call; None if its tokens or texts are incomplete."""
        first = self.choices[min(self.choices)]
        if not all(choice.usable and choice.response_json for choice in self.choices.values()):
            return None
        try:
            response = _decode(first.response_json)
            digest = request_digest(first.model, _fields_of(first.request_json))
            complete = {choice.get("index", 0) for choice in response["choices"]} == self.choices.keys()
        except (*UNREADABLE, AttributeError, KeyError, TypeError):
            return None
        if digest is None or not complete:
            return None
        for choice in self.choices.values():
            choice.ClearField("request_json")
        return CapturedCall(
            span_id=self.span_id,
            digest=digest,
            policy=first.policy,
            was_seen=not self.gone,
            choices=self.choices,
            size_bytes=sum(choice.ByteSize() + _OVERHEAD_BYTES for choice in self.choices.values()),
        )


class CallSequence:
    """The calls of a lost attempt that have not been given yet.

    A request is answered by the earliest call with its digest. The digest covers the whole conversation with the earlier
    answers, so that calls of one conversation can be given in their order only; conversations beside each other keep
    their own. Calls whose answer the agent never saw come last among equal ones: it went on with another answer.
    """

    def __init__(self, calls: Sequence[CapturedCall]) -> None:
        self._waiting: dict[bytes, deque[CapturedCall]] = {}
        for call in sorted(calls, key=lambda each: not each.was_seen):  # a stable sort
            self._waiting.setdefault(call.digest, deque()).append(call)
        self.size_bytes = sum(call.size_bytes for call in calls)
        self._seen = sum(call.was_seen for call in calls)

    @property
    def is_over(self) -> bool:
        """Whether every call whose answer the agent had seen was given."""
        return self._seen == 0

    def count(self, digest: bytes) -> int:
        """Returns the number of calls with this digest whose answer the agent had seen."""
        return sum(call.was_seen for call in self._waiting.get(digest, ()))

    def take(self, digest: bytes) -> CapturedCall | None:
        """Returns the call that answers a request, once; None if there is none."""
        fitting = self._waiting.get(digest)
        if not fitting:
            return None
        call = fitting.popleft()
        if not fitting:
            del self._waiting[digest]
        self._seen -= call.was_seen
        self.size_bytes -= call.size_bytes
        return call
