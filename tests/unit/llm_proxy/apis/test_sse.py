"""Server-sent events: splitting them loses nothing, and their data is read back."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulmen.errors import BackendUnavailable
from fulmen_llm_proxy.apis.sse import EventSplitter, encode_event, event_data

LIMIT_BYTES = 1 << 20


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


@pytest.mark.parametrize("gap", [b"\n", b"\r\n", b"\r", b"\n\n", b"\n    "])
def test_line_breaks_of_a_document_stay_within_its_event(gap: bytes) -> None:
    document = b'{"a":%b1,%b"b": "c\\\\nd"}' % (gap, gap)
    [event] = EventSplitter(100).feed(encode_event(document, b"named"))
    assert event.count(b"\n") == 3
    assert b"\r" not in event
    data = event_data(event)
    assert data is not None
    assert json.loads(data) == json.loads(document)


def test_an_encoded_event_is_split_and_read_back() -> None:
    assert [event_data(e) for e in EventSplitter(100).feed(encode_event(b'{"a":1}'))] == [b'{"a":1}']
