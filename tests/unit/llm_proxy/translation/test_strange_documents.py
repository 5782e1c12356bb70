"""Whatever JSON comes, a translator answers with a typed error or with JSON; nothing else leaves it."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fulmen.errors import ArgumentInvalid, BackendUnavailable
from fulmen_llm_proxy.apis.api import decode_fields, encode
from fulmen_llm_proxy.apis.messages import MessagesReader, assemble_message
from fulmen_llm_proxy.apis.sse import encode_event
from fulmen_llm_proxy.translation.chat_to_messages import ChatToMessages
from fulmen_llm_proxy.translation.messages_to_chat import MessagesToChat

NAMES = st.sampled_from(
    [
        *("model", "messages", "system", "role", "content", "type", "text", "source", "data", "media_type", "url"),
        *("tools", "tool_choice", "name", "input", "input_schema", "function", "arguments", "tool_calls", "index"),
        *("id", "tool_use_id", "tool_call_id", "is_error", "thinking", "signature", "reasoning_content", "refusal"),
        *("choices", "delta", "message", "finish_reason", "stop_reason", "usage", "error", "code", "content_block"),
        *("partial_json", "stop", "max_tokens", "temperature", "response_format", "json_schema", "schema", "detail"),
        *("INVALID_JSON", "output_config", "effort", "metadata", "user_id", "image_url", "file", "thinking_blocks"),
    ]
)
WORDS = st.sampled_from(
    [
        *("user", "assistant", "system", "tool", "text", "image", "document", "tool_use", "tool_result", "thinking"),
        *("message_start", "content_block_start", "content_block_delta", "content_block_stop", "message_delta"),
        *("message_stop", "error", "message", "text_delta", "input_json_delta", "stop", "abort", "{", "INVALID_JSON"),
        *("base64", "url", "data:image/png;base64,", "image_url", "function", "any", "json_schema", ""),
    ]
)
LEAVES = st.none() | st.booleans() | st.integers(-3, 600) | st.floats(allow_nan=False, allow_infinity=False) | WORDS
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=5), max_leaves=12
)
OBJECTS = st.dictionaries(NAMES, VALUES, max_size=6)


@st.composite
def requests(draw: st.DrawFn) -> dict[str, Any]:
    texts = dict.fromkeys(("text", "id", "name", "tool_use_id", "signature", "thinking", "title"), WORDS)
    source = st.fixed_dictionaries({}, optional=dict.fromkeys(("type", "media_type", "data", "url"), WORDS))
    kinds = st.sampled_from(["tool_use", "tool_result", "text", "image", "document", "thinking", "search_result"])
    written = st.dictionaries(st.sampled_from(["a", "INVALID_JSON"]), VALUES, max_size=1)
    block = st.fixed_dictionaries(
        {"type": kinds}, optional=texts | {"input": written | VALUES, "source": source, "content": WORDS | VALUES}
    )
    role = st.sampled_from(["user", "assistant", "system", "tool"])
    turn = st.fixed_dictionaries({"role": role, "content": st.lists(block, max_size=3) | WORDS})
    more = draw(OBJECTS) if draw(st.booleans()) else {}
    return more | {"messages": draw(st.lists(turn, max_size=3) | VALUES)}


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(request=requests())
def test_a_request_is_translated_or_refused(request: dict[str, Any]) -> None:
    for translator in (MessagesToChat(), ChatToMessages(now=lambda: 0.0)):
        try:
            translated = translator.request(decode_fields(json.dumps(request).encode()))
        except ArgumentInvalid:
            continue
        json.loads(encode(translated))


@settings(deadline=None)
@given(body=OBJECTS.map(json.dumps).map(str.encode) | st.binary(max_size=20))
def test_an_answer_is_translated_or_the_backends_failure(body: bytes) -> None:
    for translator in (MessagesToChat(), ChatToMessages(now=lambda: 0.0)):
        try:
            translated = translator.whole(body)
        except BackendUnavailable:
            continue
        json.loads(translated)


@settings(deadline=None)
@given(events=st.lists(OBJECTS.map(json.dumps).map(str.encode) | st.just(b"[DONE]"), max_size=6))
def test_a_stream_is_translated_or_the_backends_failure(events: list[bytes]) -> None:
    for translator in (MessagesToChat(), ChatToMessages(now=lambda: 0.0)):
        try:
            out = [piece for event in events for piece in translator.event(encode_event(event))] + translator.end()
        except BackendUnavailable:
            continue
        assert all(piece.endswith(b"\n\n") for piece in out)


@settings(deadline=None)
@given(events=st.lists(OBJECTS.map(json.dumps).map(str.encode) | st.binary(max_size=9), max_size=6))
def test_a_passed_stream_is_read_without_a_change_and_put_together(events: list[bytes]) -> None:
    reader = MessagesReader()
    for event in events:
        assert reader.event(encode_event(event)) == encode_event(event)
    json.loads(assemble_message(reader.collected.payloads))
