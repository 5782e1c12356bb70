"""Cursors and page tokens: opaque, complete, bound to their selection."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulmen.errors import ArgumentInvalid, CursorInvalid, PageTokenInvalid
from fulmen_store.rollouts.feed_cursor import Cursor, Selection
from fulmen_store.transport.page_tokens import decode_token, encode_token, page_size

cursors = st.builds(Cursor, xid=st.integers(0, 2**63 - 1), rollout_id=st.uuids())
selections = st.builds(Selection, project_id=st.integers(1, 2**31 - 1), run_id=st.none() | st.integers(1, 2**31 - 1))


@given(cursors, selections)
def test_a_cursor_survives_the_round_trip(cursor: Cursor, selection: Selection) -> None:
    assert Cursor.decode(cursor.encode(selection), selection) == cursor


@given(cursors, st.lists(selections, min_size=2, max_size=2, unique=True))
def test_a_cursor_of_another_selection_is_refused(cursor: Cursor, both: list[Selection]) -> None:
    with pytest.raises(CursorInvalid):
        Cursor.decode(cursor.encode(both[0]), both[1])


@given(st.text(min_size=1), selections)
def test_no_text_breaks_the_decoder(text: str, selection: Selection) -> None:
    with pytest.raises(CursorInvalid):
        Cursor.decode(text, selection)


@given(st.binary(min_size=16, max_size=16), st.text())
def test_a_page_token_survives_the_round_trip_for_its_list_only(key: bytes, listed: str) -> None:
    token = encode_token(key, listed=listed)
    assert decode_token(token, listed=listed, key_bytes=16) == key
    with pytest.raises(PageTokenInvalid):
        decode_token(token, listed=listed + "x", key_bytes=16)
    assert decode_token("", listed=listed, key_bytes=16) is None


@given(st.text(min_size=1))
def test_no_text_breaks_page_tokens(text: str) -> None:
    with pytest.raises(PageTokenInvalid):
        decode_token(text, listed="x", key_bytes=16)


def test_page_sizes_have_a_default_and_a_limit() -> None:
    assert (page_size(0, default=50), page_size(7, default=50), page_size(5000, default=50)) == (50, 7, 1000)
    with pytest.raises(ArgumentInvalid):
        page_size(-1, default=50)
