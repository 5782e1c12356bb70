"""An attempt's key in what its agent wrote."""

from __future__ import annotations

from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulmen_runner.attempts.masking import MASKED, masked, masked_bytes, masked_message

KEY = "fk.abc/def+ghi=jkl-mno_pqr"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *[
            (f"before {form}{form} after", f"before {MASKED}{MASKED} after")
            for form in (KEY, quote(KEY), quote(KEY, safe=""))
        ],
        # The end of a key, at the front of a text that was cut.
        *[(f"{KEY[-kept:]} after", f"{MASKED} after") for kept in (8, 15, len(KEY) - 1)],
        ("qr after", "qr after"),
        (f"x{KEY[10:]}", f"x{KEY[10:]}"),
    ],
)
def test_the_key_is_masked_whole_encoded_or_cut(text: str, expected: str) -> None:
    assert masked(text, KEY) == expected
    assert masked(text, "") == text


def test_a_message_is_masked_where_what_the_agent_wrote_was_cut() -> None:
    assert masked_message(f"It exited with status 1.\n{KEY[9:]} after", KEY) == (
        f"It exited with status 1.\n{MASKED} after"
    )
    assert masked_message(f"refused {KEY}", KEY) == f"refused {MASKED}"


def test_bytes_that_are_no_text_are_kept() -> None:
    assert masked_bytes(b"\xff" + KEY.encode() + b"\xfe", KEY) == b"\xff" + MASKED.encode() + b"\xfe"
    content = b"\xff nothing"
    assert masked_bytes(content, KEY) is content


@given(st.text(max_size=50), st.integers(min_value=0, max_value=80), st.text(max_size=50))
def test_nothing_of_the_key_that_is_longer_than_seven_is_at_the_front(before: str, cut: int, after: str) -> None:
    text = masked(f"{before}{KEY}{after}"[cut:], KEY)
    assert KEY not in text
    assert not any(text.startswith(KEY[begin:]) for begin in range(len(KEY) - 7))
