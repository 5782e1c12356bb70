"""A call is packed for the store in the form of the chat API, or is not recorded, for a reason with a name."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from fulmen.store.v1 import call_service_pb2 as pb
from fulmen_llm_proxy.apis.api import ApiName
from fulmen_llm_proxy.apis.collected import Collected
from fulmen_llm_proxy.apis.registry import APIS
from fulmen_llm_proxy.apis.usage import NO_COUNTS
from fulmen_llm_proxy.recording.app_call import AppCall
from fulmen_llm_proxy.recording.packing import MAX_CONTENT_BYTES, NotRecorded, pack
from fulmen_llm_proxy.routing.table import Recording

HELLO = b'{"messages": [{"role": "user", "content": "Hello"}]}'
ANSWER = b'{"choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "Hi"}}]}'
# Fits, and does no more when each address is replaced by a longer text.
GROWS = b'{"messages": [{"role": "user", "content": "' + (b"a@b.de " * 1000).ljust(MAX_CONTENT_BYTES - 600) + b'"}]}'


def packed(request: bytes, answer: bytes = ANSWER, **fields: Any) -> pb.NewCall:
    given: dict[str, Any] = {
        "recording": Recording(sample_rate=1.0, redact=("email",), patterns=(), retention_s=3600),
        "project": "projects/default",
        "conversation": "",
        "model": "assistant",
        "target": None,
        "fields": msgspec.json.decode(request, type=dict[str, msgspec.Raw]),
        "answer_api": APIS[ApiName.CHAT],
        "collected": Collected(payloads=[answer], complete=True) if answer else None,
        "http_status": 200,
        "error_type": "",
        "counts": NO_COUNTS,
        "cost_micros": 0.0,
        "start_ns": 10**18,
        "elapsed_s": 0.5,
        "size_bytes": 100,
    }
    return pack(AppCall(**(given | fields)))


def messages_in(new: pb.NewCall) -> Any:
    return json.loads(new.call.content.messages_json)


def test_a_text_that_is_spread_over_parts_is_one_text_before_it_is_redacted() -> None:
    parts = [{"type": "text", "text": "ann@exam"}, {"type": "text", "text": "ple.org"}]
    request = json.dumps({"messages": [{"role": "user", "content": parts}]}).encode()
    assert messages_in(packed(request)) == [{"role": "user", "content": "[email]"}]
    image = {"type": "image_url", "image_url": {"url": "https://x.org/ann@example.org.png"}}
    request = json.dumps({"messages": [{"role": "user", "content": [image]}]}).encode()
    assert b"ann@" not in packed(request).call.content.messages_json


@pytest.mark.parametrize(
    "answer", [b"<html>", b"[]", b'"x"', b'{"choices": 5}', b'{"choices": [{"message": 1}]}', b"\xff"]
)
def test_an_answer_that_is_none_leaves_the_call_without_an_answer(answer: bytes) -> None:
    new = packed(HELLO, answer, error_type="backend_unavailable", http_status=502)
    assert (new.call.content.answer_json, new.end_hash, new.call.error) == (b"", b"", "backend_unavailable")


def test_an_answer_that_broke_off_is_said_to_be_incomplete() -> None:
    broken = Collected(
        payloads=[b'{"choices": [{"index": 0, "delta": {"role": "assistant", "content": "Hel"}}]}'], streamed=True
    )
    new = packed(HELLO, collected=broken)
    assert (new.call.error, json.loads(new.call.content.answer_json)["content"]) == ("incomplete", "Hel")


@pytest.mark.parametrize(
    ("request_json", "reason"),
    [
        (b'{"messages": []}', "malformed"),
        (b'{"messages": 5}', "malformed"),
        (b'{"messages": ["x", null]}', "malformed"),
        (
            b'{"messages": [{"role": "user", "tool_calls": [{"function": {"arguments": "[\\"\\\\ud800\\"]"}}]}]}',
            "malformed",
        ),
        (b'{"messages": [{"role": "user", "content": "' + b"x" * 2_000_000 + b'"}]}', "too_large"),
        (GROWS, "too_large"),
        (b'{"input": "Hello", "previous_response_id": "r"}', "stateful"),
        (b'{"input": "Hello", "conversation": {"id": "c"}}', "stateful"),
    ],
    ids=lambda value: value[:40].decode() if isinstance(value, bytes) else value,
)
def test_a_call_that_is_not_recorded_says_why(request_json: bytes, reason: str) -> None:
    with pytest.raises(NotRecorded, match=reason):
        packed(request_json)


def test_a_response_that_continues_nothing_is_recorded() -> None:
    new = packed(b'{"input": "Hello", "previous_response_id": null}')
    assert messages_in(new) == [{"role": "user", "content": "Hello"}]
