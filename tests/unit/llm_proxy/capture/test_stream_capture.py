"""However the network cuts a stream, the agent gets the same events and the capture is the same."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulmen.errors import BackendUnavailable
from fulmen_llm_proxy.apis.chat_assembly import assemble_answer
from fulmen_llm_proxy.apis.chat_reader import ChatReader
from fulmen_llm_proxy.apis.collected import Asked, Collected
from fulmen_llm_proxy.apis.sse import EventSplitter, encode_event, event_data
from fulmen_llm_proxy.capture.decode import Captured, decode_capture

LIMIT_BYTES = 1 << 20

token = st.tuples(st.integers(0, 200_000), st.floats(-50, 0, width=32), st.text(max_size=5))


def chunk_of(token_id: int, logprob: float, text: str) -> dict:
    return {
        "id": "c",
        "object": "chat.completion.chunk",
        "unknown": {"kept": [1, 2.50]},
        "choices": [
            {
                "index": 0,
                "delta": {"content": text},
                "logprobs": {"content": [{"token": text, "logprob": logprob, "bytes": None, "top_logprobs": []}]},
                "token_ids": [token_id],
                "finish_reason": None,
            }
        ],
    }


def stream_of(tokens: list[tuple[int, float, str]], line_end: bytes) -> bytes:
    first = chunk_of(0, 0.0, "")
    first["prompt_token_ids"] = [1, 2, 3]
    first["choices"] = [{"index": 0, "delta": {"role": "assistant"}, "logprobs": None, "finish_reason": None}]
    last = {"id": "c", "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
    usage = {"id": "c", "choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": len(tokens)}}
    documents = [first, *(chunk_of(*t) for t in tokens), last, usage]
    events = [b": ping", *(b"data: " + json.dumps(d, ensure_ascii=False).encode() for d in documents), b"data: [DONE]"]
    return b"".join(event + line_end * 2 for event in events)


def run(data: bytes, cuts: list[int]) -> tuple[bytes, Collected]:
    splitter, reader = EventSplitter(LIMIT_BYTES), ChatReader(Asked())
    bounds = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    passed = b""
    for start, end in itertools.pairwise(bounds):
        passed += b"".join(reader.event(event) for event in splitter.feed(data[start:end]))
    assert splitter.rest() == b""
    return passed, reader.collected


def judged(collected: Collected) -> Captured:
    return decode_capture(collected, default_version=4)


@given(
    tokens=st.lists(token, min_size=1, max_size=12),
    cuts=st.lists(st.integers(0, 1 << 16), max_size=40),
    line_end=st.sampled_from([b"\n", b"\r\n"]),
)
def test_any_chunking_gives_the_same_events_and_the_same_capture(
    tokens: list[tuple[int, float, str]], cuts: list[int], line_end: bytes
) -> None:
    data = stream_of(tokens, line_end)
    whole, cut = run(data, []), run(data, cuts)
    assert cut[0] == whole[0]
    assert judged(cut[1]) == judged(whole[1])
    assert judged(cut[1]).flaws == ()
    assert b"token_ids" not in cut[0]
    assert b'"usage":' not in cut[0]
    answer = json.loads(assemble_answer(cut[1].payloads))
    assert answer["choices"][0]["message"]["content"] == "".join(text for _, _, text in tokens)
    assert answer["unknown"] == {"kept": [1, 2.50]}


@given(
    data=st.lists(st.sampled_from([b"a", b"\n", b"\r\n", b"data: x", b":", b"\r"]), max_size=40),
    cut=st.integers(0, 200),
)
def test_no_byte_is_lost_or_added_by_splitting(data: list[bytes], cut: int) -> None:
    joined = b"".join(data)
    splitter, at_once = EventSplitter(LIMIT_BYTES), EventSplitter(LIMIT_BYTES)
    parts = splitter.feed(joined[:cut]) + splitter.feed(joined[cut:])
    assert parts == at_once.feed(joined)
    assert b"".join(parts) + splitter.rest() == joined


def test_an_event_without_an_end_is_refused_at_the_limit() -> None:
    splitter = EventSplitter(10)
    with pytest.raises(BackendUnavailable):
        splitter.feed(b"data: 0123456789")


@pytest.mark.parametrize(
    ("event", "data"),
    [
        (b"data: {}\n\n", b"{}"),
        (b"data:{}\r\n\r\n", b"{}"),
        (b"event: x\ndata: a\ndata: b\nid: 1\n\n", b"a\nb"),
        (b": ping\n\n", None),
        (b"data: \n\n", b""),
    ],
)
def test_the_data_of_an_event(event: bytes, data: bytes | None) -> None:
    assert event_data(event) == data


def test_an_encoded_event_is_split_and_read_back() -> None:
    assert [event_data(e) for e in EventSplitter(100).feed(encode_event(b'{"a":1}'))] == [b'{"a":1}']
