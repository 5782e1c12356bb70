"""Packs a call of an app for the store: its texts in the form of the chat API, redacted, and its hashes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from fulmen.ids import call_name, conversation_name, uuid7
from fulmen.store.v1 import call_pb2
from fulmen.store.v1 import call_service_pb2 as pb
from fulmen.trajectories.chat import Message, answer_of, messages_of, tools_of
from fulmen_llm_proxy.apis.api import UNREADABLE, given
from fulmen_llm_proxy.recording.app_call import AppCall
from fulmen_llm_proxy.recording.conversations import chain
from fulmen_llm_proxy.recording.redaction import redactor_of

MAX_CONTENT_BYTES: Final = 1024 * 1024 - 64
"""The store's limit of one call's texts, bytes."""
TOO_LARGE, TIMED_OUT, MALFORMED, STATEFUL = "too_large", "redaction_timeout", "malformed", "stateful"
_STATEFUL_FIELDS: Final = frozenset({"previous_response_id", "conversation"})
_TEXT_FIELDS: Final = frozenset({"messages", "system", "instructions", "input", "tools"})
_FINISH_FIELDS: Final = ("finish_reason", "stop_reason", "status")
_FINISHES: Final = {
    "end_turn": "stop", "stop_sequence": "stop", "completed": "stop", "tool_use": "tool_calls", "max_tokens": "length",
    "incomplete": "length",
}  # fmt: skip
"""Terms of other APIs and their equivalents in the chat API."""
_MAX_WORD: Final = 128
_STRANGE = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""Exceptions that unforeseen foreign JSON may raise."""

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(dict[str, Any]).decode


class NotRecorded(Exception):
    """A call is not recorded; the text is the reason, as metrics name it."""


def pack(call: AppCall) -> pb.NewCall:
    """Packs a call.

    Raises:
        NotRecorded: if it is too large, cannot be read, or its rules take too long.
    """
    if any(given(call.fields[name]) for name in _STATEFUL_FIELDS & call.fields.keys()):
        raise NotRecorded(STATEFUL)
    try:
        return _packed(call)
    except TimeoutError:
        raise NotRecorded(TIMED_OUT) from None
    except _STRANGE:
        raise NotRecorded(MALFORMED) from None


def _packed(call: AppCall) -> pb.NewCall:
    if sum(len(value) for name, value in call.fields.items() if name in _TEXT_FIELDS) > MAX_CONTENT_BYTES:
        raise NotRecorded(TOO_LARGE)
    request = _decode(_encode({name: value for name, value in call.fields.items() if name in _TEXT_FIELDS}))
    answer = _answer(call)
    found = {
        "messages": [_joined(each) for each in messages_of(request)],
        "tools": list(tools_of(request)),
        "answer": answer_of(answer),
    }
    if not found["messages"]:
        raise NotRecorded(MALFORMED)
    if len(_encode(found)) > MAX_CONTENT_BYTES:
        raise NotRecorded(TOO_LARGE)
    found = redactor_of(call.recording).redact(found)
    messages, tools, said = found["messages"], found["tools"], found["answer"]
    content = call_pb2.CallContent(
        messages_json=_encode(messages),
        tools_json=_encode(tools) if tools else b"",
        answer_json=_encode(said) if said else b"",
    )
    if content.ByteSize() > MAX_CONTENT_BYTES:
        raise NotRecorded(TOO_LARGE)
    end, prefixes = chain(messages, said)
    new = pb.NewCall(call=_described(call, answer, len(messages)), end_hash=end, prefix_hashes=prefixes)
    new.call.content.CopyFrom(content)
    new.retention.seconds = call.recording.retention_s
    return new


def _joined(message: Message) -> Message:
    """Returns a message whose parts of text are one text: a rule finds nothing that is spread over several."""
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    texts = [each["text"] for each in parts if isinstance(each, dict) and isinstance(each.get("text"), str)]
    return {**message, "content": "".join(texts)} if texts and len(texts) == len(parts) else message


def _answer(call: AppCall) -> Mapping[str, Any]:
    """Returns the answer in the backend's API, as far as it arrived; empty without one, or if it is not a JSON
    object."""
    collected = call.collected
    if collected is None or not collected.payloads:
        return {}
    streamed = collected.streamed
    whole = call.answer_api.assemble(collected.payloads) if streamed else collected.payloads[0]
    try:
        return _decode(whole)
    except UNREADABLE:
        return {}


def _described(call: AppCall, answer: Mapping[str, Any], message_count: int) -> call_pb2.RecordedCall:
    target, counts, error = call.target, call.counts, call.error_type
    if not error and call.collected is not None and not call.collected.complete:
        error = "incomplete"
    described = call_pb2.RecordedCall(
        name=call_name(call.project, uuid7(call.start_ns // 1_000_000)),
        conversation=conversation_name(call.project, call.conversation) if call.conversation else "",
        model=call.model,
        backend="" if target is None else f"backends/{target.backend_id}",
        policy="" if target is None else target.policy[:_MAX_WORD],
        policy_version=target.policy_version if target is not None and target.policy else 0,
        http_status=call.http_status,
        error=error[:_MAX_WORD],
        finish_reason=_finish_reason(answer),
        prompt_token_count=counts.prompt or 0,
        cached_token_count=counts.cached,
        completion_token_count=counts.completion or 0,
        cost_micros=int(call.cost_micros),
        message_count=message_count,
    )
    described.create_time.FromNanoseconds(call.start_ns)
    described.duration.FromNanoseconds(max(0, int(call.elapsed_s * 1e9)))
    return described


def _finish_reason(answer: Mapping[str, Any]) -> str:
    choices = answer.get("choices")
    said = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else answer
    word = next((said[name] for name in _FINISH_FIELDS if isinstance(said.get(name), str)), "")
    word = _FINISHES.get(word, word)
    return word[:_MAX_WORD] if word.isascii() and word.isprintable() else ""
