"""An attempt's key in what its agent wrote."""

from __future__ import annotations

import json
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
    assert masked(text, [KEY]) == expected
    assert masked(text, [""]) == text


def test_a_message_is_masked_where_what_the_agent_wrote_was_cut() -> None:
    assert masked_message(f"It exited with status 1.\n{KEY[9:]} after", [KEY]) == (
        f"It exited with status 1.\n{MASKED} after"
    )
    assert masked_message(f"refused {KEY}", [KEY]) == f"refused {MASKED}"


def test_bytes_that_are_no_text_are_kept() -> None:
    assert masked_bytes(b"\xff" + KEY.encode() + b"\xfe", [KEY]) == b"\xff" + MASKED.encode() + b"\xfe"
    content = b"\xff nothing"
    assert masked_bytes(content, [KEY]) is content


@given(st.text(max_size=50), st.integers(min_value=0, max_value=80), st.text(max_size=50))
def test_nothing_of_the_key_that_is_longer_than_seven_is_at_the_front(before: str, cut: int, after: str) -> None:
    text = masked(f"{before}{KEY}{after}"[cut:], [KEY])
    assert KEY not in text
    assert not any(text.startswith(KEY[begin:]) for begin in range(len(KEY) - 7))


LINES = "-----BEGIN PRIVATE KEY-----\nMIIEvQIBADANBgkqhkiG9w0B\nshort\n-----END PRIVATE KEY-----"
QUOTED = 'pass"word\\with \u00fc'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"a {LINES} b {KEY} c", f"a {MASKED} b {MASKED} c"),
        (json.dumps({"x": LINES}), json.dumps({"x": MASKED})),
        ("MIIEvQIBADANBgkqhkiG9w0B", MASKED),
        ("a short word", "a short word"),
        (json.dumps([QUOTED]), json.dumps([MASKED])),
        (json.dumps([QUOTED], ensure_ascii=False), json.dumps([MASKED])),
    ],
)
def test_several_secrets_are_masked_their_lines_and_as_in_json(text: str, expected: str) -> None:
    assert masked(text, [KEY, LINES, QUOTED]) == expected


def test_a_secret_within_another_leaves_nothing_of_the_longer_one() -> None:
    assert masked("abcdefgh-ijkl", ["abcdefgh", "abcdefgh-ijkl"]) == MASKED


def test_a_secret_that_repeats_itself_costs_no_time() -> None:
    assert len(masked("a" * 60_000 + "b", ["a" * 65_536])) > 0
