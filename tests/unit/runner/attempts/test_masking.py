"""An attempt's key in what its agent wrote."""

from __future__ import annotations

from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulmen_runner.attempts.masking import MASKED, masked, masked_bytes, masked_message

KEY = "fk.abc/def+ghi=jkl-mno_pqr"


@pytest.mark.parametrize("form", [KEY, quote(KEY), quote(KEY, safe="")])
def test_the_key_is_masked_plain_and_percent_encoded(form: str) -> None:
    assert masked(f"before {form}{form} after", KEY) == f"before {MASKED}{MASKED} after"


@pytest.mark.parametrize("kept", [8, 15, len(KEY) - 1])
def test_the_end_of_a_key_at_the_front_of_a_cut_text_is_masked(kept: int) -> None:
    assert masked(f"{KEY[-kept:]} after", KEY) == f"{MASKED} after"


def test_a_message_is_masked_where_what_the_agent_wrote_was_cut() -> None:
    assert masked_message(f"It exited with status 1.\n{KEY[9:]} after", KEY) == (
        f"It exited with status 1.\n{MASKED} after"
    )
    assert masked_message(f"refused {KEY}", KEY) == f"refused {MASKED}"


def test_a_short_end_is_left_alone_and_so_is_the_middle() -> None:
    assert masked("qr after", KEY) == "qr after"
    assert masked(f"x{KEY[10:]}", KEY) == f"x{KEY[10:]}"


def test_no_key_masks_nothing() -> None:
    assert masked("text", "") == "text"


def test_bytes_that_are_no_text_are_kept() -> None:
    assert masked_bytes(b"\xff" + KEY.encode() + b"\xfe", KEY) == b"\xff" + MASKED.encode() + b"\xfe"
    content = b"\xff nothing"
    assert masked_bytes(content, KEY) is content


@given(st.text(max_size=50), st.integers(min_value=0, max_value=80), st.text(max_size=50))
def test_nothing_of_the_key_that_is_longer_than_seven_is_at_the_front(before: str, cut: int, after: str) -> None:
    text = masked(f"{before}{KEY}{after}"[cut:], KEY)
    assert KEY not in text
    assert not any(text.startswith(KEY[begin:]) for begin in range(len(KEY) - 7))
