"""Answers over gRPC are no larger than its clients accept."""

from __future__ import annotations

import pytest

from fulmen.errors import MessageTooLarge
from fulmen.llm_proxy.v1.completion_service_pb2 import CompleteResponse, StreamCompleteResponse
from fulmen_llm_proxy.transport.completion_servicer import sendable

LIMIT_BYTES = 4 * 1024 * 1024


def test_an_answer_that_fits_is_sent_and_a_larger_one_is_an_error_that_says_what_to_do() -> None:
    # A tag and a length of four bytes come before the body.
    fits = CompleteResponse(body_json=b"x" * (LIMIT_BYTES - 5))
    assert sendable(fits) is fits
    for larger in (
        CompleteResponse(body_json=b"x" * LIMIT_BYTES),
        StreamCompleteResponse(event_json=b"x" * LIMIT_BYTES),
    ):
        with pytest.raises(MessageTooLarge, match="stream it, or call over HTTP"):
            sendable(larger)
