"""A chat stream becomes a Messages stream whose blocks never overlap, however it is cut."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fulmen.errors import BackendUnavailable
from fulmen_llm_proxy.apis.sse import EventSplitter
from fulmen_llm_proxy.translation.messages_to_chat import MessagesToChat
from tests.support.llm_proxy.chat_answers import (
    ROLE,
    USAGE,
    call_piece,
    chunk,
    completion,
    stream_of,
    text,
    tool_call,
    tool_use,
)
from tests.support.llm_proxy.vendors.anthropic_dialect import JSON, accumulated, events_of, message_of, slim


def translated(stream: bytes, cuts: tuple[int, ...] = ()) -> bytes:
    translator, splitter, out = MessagesToChat(), EventSplitter(1 << 20), b""
    bounds = sorted({0, len(stream), *(cut % (len(stream) + 1) for cut in cuts)})
    for start, end in itertools.pairwise(bounds):
        out += b"".join(out for event in splitter.feed(stream[start:end]) for out in translator.event(event))
    return out + b"".join(translator.end())


def test_every_kind_of_block_is_streamed_in_order() -> None:
    stream = stream_of(
        ROLE,
        chunk({"reasoning": "h"}),
        chunk({"reasoning": "m"}),
        chunk({"content": "so"}),
        chunk(call_piece(0, id="c1", name="add")),
        chunk(call_piece(0, '{"a":')),
        chunk(call_piece(0, "1}")),
        chunk(call_piece(1, "{}", id="c2", name="sub")),
        chunk({}, "tool_calls"),
        USAGE,
    )
    out = translated(stream)
    message = accumulated(out)
    assert slim(message)["content"] == [
        {"type": "thinking", "thinking": "hm", "signature": "reasoning"},
        text("so"),
        tool_use("add", "c1", a=1),
        tool_use("sub", "c2"),
    ]
    assert message["stop_reason"] == "tool_use"
    assert (message["usage"]["input_tokens"], message["usage"]["output_tokens"]) == (4, 4)
    deltas = [event.delta.type for event in events_of(out) if event.type == "content_block_delta"]
    assert deltas == ["thinking_delta"] * 2 + ["signature_delta", "text_delta"] + ["input_json_delta"] * 3


def test_each_piece_is_told_as_soon_as_it_comes() -> None:
    translator = MessagesToChat()
    pieces = [ROLE, chunk({"content": "a"}), chunk(call_piece(0, id="c", name="n")), chunk(call_piece(0, '{"x"'))]
    told = [b"".join(translator.event(stream_of(piece, done=False))) for piece in pieces]
    assert b"message_start" in told[0]
    assert b'"text":"a"' in told[1]
    assert b"content_block_stop" in told[2]
    assert b'"name":"n"' in told[2]
    assert b'"partial_json":"{\\"x\\""' in told[3]


def test_pieces_of_parallel_calls_that_come_in_turns_make_blocks_that_do_not_overlap() -> None:
    out = translated(
        stream_of(
            ROLE,
            chunk(call_piece(0, '{"a"', id="c0", name="f")),
            chunk(call_piece(1, '{"b"', id="c1", name="g")),
            chunk(call_piece(0, ":1}")),
            chunk(call_piece(1, ":2}")),
            chunk({}, "tool_calls"),
        )
    )
    assert slim(accumulated(out))["content"] == [tool_use("f", "c0", a=1), tool_use("g", "c1", b=2)]


def test_calls_without_an_index_or_with_the_same_one_are_told_apart_by_their_ids() -> None:
    for index in (None, 0):
        out = translated(
            stream_of(
                ROLE,
                chunk(call_piece(index, '{"a":1}', id="c0", name="f")),
                chunk(call_piece(index, '{"b":', id="c1", name="g")),
                chunk(call_piece(index, "2}")),
                chunk({}, "stop"),
            )
        )
        message = accumulated(out)
        assert slim(message)["content"] == [tool_use("f", "c0", a=1), tool_use("g", "c1", b=2)]
        assert message["stop_reason"] == "tool_use"


def test_text_after_a_call_and_a_name_that_comes_late() -> None:
    out = translated(
        stream_of(
            ROLE,
            chunk(call_piece(0, id="c0")),
            chunk({"content": "and"}),
            chunk(call_piece(0, "{}", name="f")),
            chunk({}, "tool_calls"),
        )
    )
    assert slim(accumulated(out))["content"] == [tool_use("f", "c0"), text("and")]


def test_an_answer_without_content_still_ends_with_a_stop_reason() -> None:
    message = accumulated(translated(stream_of(ROLE)))
    assert (message["content"], message["stop_reason"]) == ([], "end_turn")
    message = accumulated(translated(stream_of(ROLE, chunk({}, "stop", stop_reason="END"), done=False)))
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "END")


def test_the_message_begins_with_the_answer_and_not_with_what_azure_says_of_the_prompt() -> None:
    prelude = {"id": "", "model": "", "choices": [], "prompt_filter_results": []}
    message = accumulated(translated(stream_of(prelude, ROLE, chunk({"content": "a"}, "stop"))))
    assert (message["id"], message["model"]) == ("msg_7", "m")


def test_other_choices_are_left_out_and_comments_are_pings() -> None:
    other = {"id": "c", "choices": [{"index": 1, "delta": {"content": "no"}, "finish_reason": "length"}]}
    out = translated(b": alive\n\n" + stream_of(ROLE, other, chunk({"content": "yes"}, "stop")))
    assert out.startswith(b'event: ping\ndata: {"type":"ping"}\n\n')
    message = accumulated(out)
    assert (slim(message)["content"], message["stop_reason"]) == ([text("yes")], "end_turn")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ({"error": {"message": "bad", "type": "BadRequestError", "code": 400}}, "invalid_request_error"),
        ({"error": {"message": "bad", "type": "server_error", "code": None}}, "api_error"),
        ({"object": "error", "message": "bad", "code": 429}, "api_error"),
        ({"error": {"message": "bad", "code": "429"}}, "rate_limit_error"),
    ],
)
def test_an_error_within_a_stream_is_an_error_event_and_the_last_one(error: JSON, kind: str) -> None:
    out = translated(stream_of(ROLE, chunk({"content": "a"}), error))
    last = out.rstrip(b"\n").split(b"\n\n")[-1].decode()
    assert last.startswith("event: error\ndata: ")
    told = json.loads(last.partition("data: ")[2])
    assert told["type"] == "error"
    assert (told["error"]["type"], told["error"]["message"]) == (kind, "bad")
    assert b"message_stop" not in out


@pytest.mark.parametrize(
    "stream",
    [
        b"",
        b"data: [DONE]\n\n",
        stream_of(ROLE, chunk({"content": "half"}), done=False),
        b"data: {\n\n",
        b"data: []\n\n",
        b'data: {"choices": 3}\n\n',
        b"data: \xff\n\n",
        stream_of(ROLE, chunk({}, "abort")),
    ],
)
def test_a_stream_that_breaks_off_or_is_none_is_the_backends_failure(stream: bytes) -> None:
    with pytest.raises(BackendUnavailable):
        translated(stream)


words = st.text(st.characters(codec="utf-8"), max_size=8)
json_objects = st.dictionaries(words, st.integers() | words | st.lists(st.booleans(), max_size=2), max_size=3)


@st.composite
def answers(draw: st.DrawFn) -> tuple[JSON, list[JSON]]:
    """Draws a chat message and chunks that amount to it: pieces of all sizes, parallel calls mixed or not."""
    message: JSON = {"role": "assistant", "content": None}
    deltas: list[JSON] = []
    for field in ("reasoning_content", "content"):
        pieces = draw(st.lists(words, max_size=4))
        if any(pieces):
            message[field] = "".join(pieces)
        deltas += [{field: piece} for piece in pieces]
    queues: list[list[JSON]] = []
    for index in range(draw(st.integers(0, 3))):
        arguments = json.dumps(draw(json_objects))
        cut = draw(st.integers(0, len(arguments)))
        call = tool_call(f"tool{index}", f"call_{index}", arguments)
        message.setdefault("tool_calls", []).append(call)
        queues.append(
            [
                call_piece(index, id=call["id"], name=call["function"]["name"]),
                call_piece(index, arguments[:cut]),
                call_piece(index, arguments[cut:]),
            ]
        )
    if draw(st.booleans()):
        opened = [queue.pop(0) for queue in queues]
        pending = draw(st.permutations([index for index, queue in enumerate(queues) for _ in queue]))
        deltas += [*opened, *(queues[index].pop(0) for index in pending)]
    else:
        deltas += [piece for queue in queues for piece in queue]
    return message, deltas


@settings(deadline=None)
@given(drawn=answers(), cuts=st.lists(st.integers(0, 1 << 16), max_size=12))
def test_whole_and_streamed_answers_amount_to_the_same_however_the_network_cuts(
    drawn: tuple[JSON, list[JSON]], cuts: list[int]
) -> None:
    message, deltas = drawn
    finish = "tool_calls" if "tool_calls" in message else "stop"
    stream = stream_of(ROLE, *(chunk(delta) for delta in deltas), chunk({}, finish), USAGE)
    at_once, cut = translated(stream), translated(stream, tuple(cuts))
    assert cut == at_once
    whole = message_of(MessagesToChat().whole(completion(message, finish)))
    assert slim(accumulated(at_once)) == slim(whole)
