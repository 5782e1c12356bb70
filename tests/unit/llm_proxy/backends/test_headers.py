"""Which headers pass, both ways."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulmen_llm_proxy.apis.api import Dialect
from fulmen_llm_proxy.backends.headers import (
    LIMITS_TO_CALLERS,
    TO_BACKENDS,
    TO_CALLERS,
    of_dialect,
    to_backend,
    to_caller,
)

NAMES = st.sampled_from([*TO_BACKENDS, *TO_CALLERS, b"x-ratelimit-remaining-tokens", b"authorization", b"set-cookie"])
HEADERS = st.lists(st.tuples(NAMES | st.binary(max_size=20), st.binary(max_size=40)), max_size=20)


@given(headers=HEADERS)
def test_nothing_passes_that_is_not_named_and_no_value_begins_another_header(
    headers: list[tuple[bytes, bytes]],
) -> None:
    forth, back = to_backend(headers), to_caller(headers)
    assert {name.encode() for name in forth} <= TO_BACKENDS.keys()
    assert all(name in TO_CALLERS or name.startswith(LIMITS_TO_CALLERS) for name, _ in back)
    for value in [*forth.values(), *(value.decode("ascii") for _, value in back)]:
        assert value.isprintable()
    assert all(name.isascii() and name.decode().isprintable() for name, _ in back)


def test_what_is_named_passes_with_its_value() -> None:
    assert to_backend([(b"traceparent", b"00-1-2-01"), (b"traceparent", b"second"), (b"cookie", b"x")]) == {
        "traceparent": "00-1-2-01"
    }
    assert to_caller([(b"X-Request-Id", b"r1"), (b"Set-Cookie", b"x"), (b"Server", b"x"), (b"Retry-After", b"3")]) == [
        (b"x-request-id", b"r1"),
        (b"retry-after", b"3"),
    ]


@pytest.mark.parametrize("value", [b"a\r\nb: c", b"a\nb", b"a\x00", b"\xff", b"x" * 1025])
def test_a_value_that_could_be_more_than_a_value_stays(value: bytes) -> None:
    assert to_backend([(b"tracestate", value)]) == {}
    assert to_caller([(b"x-request-id", value)]) == []


def test_headers_of_one_dialect_do_not_reach_a_server_of_another() -> None:
    headers = {"anthropic-beta": "a", "openai-beta": "o", "traceparent": "t"}
    assert of_dialect(headers, Dialect.OPENAI) == {"openai-beta": "o", "traceparent": "t"}
    assert of_dialect(headers, Dialect.ANTHROPIC) == {"anthropic-beta": "a", "traceparent": "t"}
