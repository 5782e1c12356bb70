"""Whatever JSON comes, a translator answers with a typed error or with JSON; nothing else leaves it."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fulmen.errors import ArgumentInvalid, BackendUnavailable
from fulmen_llm_proxy.apis.api import ApiName, decode_fields, encode, read_fields
from fulmen_llm_proxy.apis.messages import MessagesReader, assemble_message
from fulmen_llm_proxy.apis.sse import encode_event
from fulmen_llm_proxy.calls.replay.captured_calls import request_digest
from fulmen_llm_proxy.translation.chat_to_messages import ChatToMessages
from fulmen_llm_proxy.translation.messages_to_chat import MessagesToChat
from fulmen_llm_proxy.translation.responses_to_chat import ResponsesToChat

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


NESTED: dict[str, tuple[bytes, bytes, bytes]] = {
    "documents": (
        b'{"model":"m","messages":[{"role":"user","content":[{"type":"document","source":{"type":"content","content":',
        b'[{"type":"document","source":{"type":"content","content":',
        b"}}]",
    ),
    "results": (
        b'{"model":"m","messages":[{"role":"user","content":[{"type":"tool_result","content":',
        b'[{"type":"document","source":{"type":"content","content":',
        b"}}]",
    ),
    "namespaces": (b'{"model":"m","input":"x","tools":', b'[{"type":"namespace","name":"a","tools":', b"}]"),
    "schemas": (b'{"model":"m","messages":[],"tools":[{"name":"a","input_schema":', b'{"a":', b"}"),
}
ENDS = {"documents": b"}}]}]}", "results": b"}]}]}", "namespaces": b"}", "schemas": b"}]}"}


@pytest.mark.parametrize("kind", NESTED)
@pytest.mark.parametrize("depth", [3, 100, 200, 250, 280, 300, 320, 400, 490, 800, 980, 100_000])
def test_a_request_of_any_depth_is_translated_or_refused(kind: str, depth: int) -> None:
    begin, opening, closing = NESTED[kind]
    body = begin + opening * depth + (b"{}" if kind == "schemas" else b"[]") + closing * depth + ENDS[kind]
    for translator in (MessagesToChat(), ChatToMessages(now=lambda: 0.0), ResponsesToChat()):
        try:
            translator.request(read_fields(body, ApiName.CHAT))
        except ArgumentInvalid:
            continue


@pytest.mark.parametrize("depth", [900, 990, 100_000])
def test_arguments_of_any_depth_are_the_callers(depth: int) -> None:
    arguments = '{"a":' * depth + "1" + "}" * depth
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    message = {"role": "assistant", "tool_calls": [call]}
    answer = json.dumps({"id": "a", "choices": [{"index": 0, "finish_reason": "tool_calls", "message": message}]})
    assert b'"tool_use"' in MessagesToChat().whole(answer.encode())
    assert ChatToMessages(now=lambda: 0.0).request(decode_fields(json.dumps({"messages": [message]}).encode()))


def test_a_document_within_a_document_is_refused() -> None:
    inner = {"type": "document", "source": {"type": "text", "data": "x"}}
    block = {"type": "document", "source": {"type": "content", "content": [inner]}}
    with pytest.raises(ArgumentInvalid, match=r"content\[0\].source.content \(a document in a document\)"):
        MessagesToChat().request(
            decode_fields(json.dumps({"messages": [{"role": "user", "content": [block]}]}).encode())
        )


def test_a_refusal_names_so_many_problems_that_it_can_be_read() -> None:
    tools = [{"type": "x" * 1000, "name": f"{number}"} for number in range(1000)]
    with pytest.raises(ArgumentInvalid, match=r"; and 950 more\.$") as refused:
        ResponsesToChat().request(decode_fields(json.dumps({"input": "x", "tools": tools}).encode()))
    assert len(str(refused.value)) < 50 * 400


def test_many_tools_take_a_time_that_grows_with_their_number() -> None:
    # Compared pair by pair they take longer than a test may.
    tools = [{"type": "custom", "name": f"{number}"} for number in range(30_000)]
    body = decode_fields(json.dumps({"input": "x", "tools": tools}).encode())
    assert len(json.loads(bytes(ResponsesToChat().request(body)["tools"]))) == len(tools)


def test_a_request_of_any_depth_is_compared_with_captures_or_not_readable() -> None:
    for depth in (10, *range(850, 1010)):
        fields = {"messages": msgspec.Raw(b"[" * depth + b"]" * depth)}
        assert request_digest("m", fields) is not None or depth > 800
