"""A Messages stream becomes a chat stream, or passes as it is, however it is cut."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from anthropic.types import Message, ThinkingBlock, ToolUseBlock
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.lib.streaming.chat._completions import ChatCompletionStreamState
from openai.types.chat import ChatCompletionChunk

from fulmen.errors import BackendUnavailable
from fulmen_llm_proxy.apis.api import decode_fields
from fulmen_llm_proxy.apis.messages import MessagesReader, assemble_message
from fulmen_llm_proxy.apis.sse import EventSplitter, event_data
from fulmen_llm_proxy.capture.decode import decode_capture
from fulmen_llm_proxy.translation.chat_to_messages import ChatToMessages
from tests.support.llm_proxy.vendors import anthropic as vendor
from tests.support.llm_proxy.vendors.anthropic import SAID_THOUGHT, message, said, used
from tests.support.llm_proxy.vendors.anthropic_dialect import slim

JSON = dict[str, Any]


def translator() -> ChatToMessages:
    return ChatToMessages(now=lambda: 1_700_000_000.5)


def answered(answer: Message) -> JSON:
    return json.loads(translator().whole(answer.model_dump_json(exclude_unset=True).encode()))


def vendor_stream(answer: Message, piece_bytes: int = 4) -> bytes:
    return b"".join(vendor.encode(event) for event in vendor.events_of(answer, piece_bytes))


def translated(stream: bytes, cuts: tuple[int, ...] = (), *, usage: bool = True) -> bytes:
    request = {"model": "m", "messages": [], "stream_options": {"include_usage": usage}}
    one, splitter, out = translator(), EventSplitter(1 << 20), b""
    one.request(decode_fields(json.dumps(request).encode()))
    bounds = sorted({0, len(stream), *(cut % (len(stream) + 1) for cut in cuts)})
    for start, end in itertools.pairwise(bounds):
        out += b"".join(out for event in splitter.feed(stream[start:end]) for out in one.event(event))
    return out + b"".join(one.end())


def chunks_of(stream: bytes) -> list[ChatCompletionChunk]:
    datas = [event_data(event) for event in EventSplitter(1 << 20).feed(stream)]
    datas = [data for data in datas if data is not None]
    assert datas[-1] == b"[DONE]"
    return [ChatCompletionChunk.model_validate_json(data, strict=True) for data in datas[:-1] if data is not None]


def accumulated(stream: bytes) -> JSON:
    """Returns the completion that the vendor's client makes of a stream."""
    state: ChatCompletionStreamState[None] = ChatCompletionStreamState()
    for chunk in chunks_of(stream):
        state.handle_chunk(chunk)
    return json.loads(state.current_completion_snapshot.model_dump_json())


def comparable(completion: JSON) -> JSON:
    """Leaves out what the client adds to a stream's pieces, and how the arguments were written."""
    read = slim(completion)
    for choice in read["choices"]:
        for block in choice["message"].get("thinking_blocks", []):
            block.pop("index", None)
        for one in choice["message"].get("tool_calls", []):
            one.pop("index", None)
            one["function"].pop("parsed_arguments", None)
            one["function"]["arguments"] = json.loads(one["function"]["arguments"])
        choice["message"]["content"] = choice["message"].get("content") or ""
    return read | {"object": "chat.completion"}


def test_a_stream_tells_role_pieces_calls_finish_and_usage() -> None:
    out = translated(
        vendor_stream(message(SAID_THOUGHT, said("hello"), used(a=1), used("t2", "sub"), stop_reason="tool_use"))
    )
    chunks = chunks_of(out)
    assert chunks[0].choices[0].delta.role == "assistant"
    calls = [piece for chunk in chunks if chunk.choices for piece in chunk.choices[0].delta.tool_calls or []]
    assert [(piece.index, piece.id) for piece in calls if piece.id] == [(0, "toolu_1"), (1, "t2")]
    assert "".join(piece.function.arguments for piece in calls if piece.index == 1) == "{}"
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["tool_calls"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens) == (11, 5)
    assert b": ping\n\n" in out


def test_usage_is_told_only_if_asked_for() -> None:
    assert b'"usage"' not in translated(vendor_stream(message(said("x"))), usage=False)


def test_each_piece_is_told_as_soon_as_it_comes() -> None:
    one = translator()
    for event in EventSplitter(1 << 20).feed(vendor_stream(message(said("hello"), used(a=1), stop_reason="tool_use"))):
        out = b"".join(one.event(event))
        data = json.loads(event_data(event) or b"{}")
        piece = data.get("delta", {}).get("text") or data.get("delta", {}).get("partial_json")
        assert not piece or json.dumps(piece)[1:-1].encode() in out


def test_an_error_within_a_stream_is_told_and_ends_it() -> None:
    error = vendor.encode(vendor.error_of("overloaded_error", "Overloaded"))
    out = translated(vendor_stream(message(said("hello")))[:-60].rpartition(b"\n\n")[0] + b"\n\n" + error)
    last = json.loads(event_data(EventSplitter(1 << 20).feed(out)[-1]) or b"")
    assert last["error"]["message"] == "Overloaded"
    assert last["error"]["code"] == "overloaded_error"
    assert b"[DONE]" not in out


@pytest.mark.parametrize(
    "stream",
    [
        b"",
        vendor_stream(message(said("hello")))[:300].rpartition(b"\n\n")[0] + b"\n\n",
        b"event: x\ndata: {\n\n",
        b"data: []\n\n",
        b'data: {"type": 3}\n\n',
        b'data: {"type":"message_delta","usage":3}\n\n',
        b"data: \xff\n\n",
    ],
)
def test_a_stream_that_breaks_off_or_is_none_is_the_backends_failure(stream: bytes) -> None:
    with pytest.raises(BackendUnavailable):
        translated(stream)


words = st.text(st.characters(codec="utf-8"), max_size=8)
json_objects = st.dictionaries(words, st.integers(-(2**53), 2**53) | words | st.booleans(), max_size=3)
blocks = st.one_of(
    words.map(said),
    st.builds(lambda thought: ThinkingBlock(type="thinking", thinking=thought, signature="s"), words),
    st.builds(lambda given_input: ToolUseBlock(type="tool_use", id="t", name="add", input=given_input), json_objects),
)


@st.composite
def messages(draw: st.DrawFn) -> Message:
    content = draw(st.lists(blocks, max_size=5))
    for number, block in enumerate(content):
        if isinstance(block, ToolUseBlock):
            block.id = f"toolu_{number}"
    reason = draw(st.sampled_from(["end_turn", "max_tokens", "tool_use", "refusal", "pause_turn"]))
    return message(*content, stop_reason=reason)


@settings(deadline=None)
@given(answer=messages(), piece_bytes=st.integers(1, 9), cuts=st.lists(st.integers(0, 1 << 16), max_size=12))
def test_whole_and_streamed_answers_amount_to_the_same_however_the_network_cuts(
    answer: Message, piece_bytes: int, cuts: list[int]
) -> None:
    stream = vendor_stream(answer, piece_bytes)
    at_once = translated(stream)
    assert translated(stream, tuple(cuts)) == at_once
    whole, streamed = comparable(answered(answer)), comparable(accumulated(at_once))
    if not whole["choices"][0]["message"].get("reasoning_content"):
        whole["choices"][0]["message"].pop("reasoning_content", None)
    assert streamed == whole


@settings(deadline=None)
@given(answer=messages(), piece_bytes=st.integers(1, 9))
def test_a_stream_passes_byte_for_byte_and_amounts_to_its_message(answer: Message, piece_bytes: int) -> None:
    stream, reader = vendor_stream(answer, piece_bytes), MessagesReader()
    passed = b"".join(reader.event(event) for event in EventSplitter(1 << 20).feed(stream)) + reader.end()
    assert passed == stream
    assert reader.collected.complete
    assert not reader.collected.malformed
    captured = decode_capture(reader.collected, default_version=1)
    assert (captured.usage.prompt, captured.usage.completion, captured.usage.cached) == (11, 5, 6)
    assert captured.choices[0].finish_reason == answer.stop_reason
    assert slim(json.loads(assemble_message(reader.collected.payloads))) == slim(json.loads(answer.model_dump_json()))
