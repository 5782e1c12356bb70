"""Responses that pass through: not a byte changes, and what the answer brought is known."""

from __future__ import annotations

import json

import pytest
from openai.types.responses import ResponseErrorEvent

from fulmen.errors import ArgumentInvalid
from fulmen_llm_proxy.apis.collected import Asked
from fulmen_llm_proxy.apis.errors import CallError, error_event
from fulmen_llm_proxy.apis.responses import ResponsesApi, ResponsesReader
from fulmen_llm_proxy.apis.sse import encode_event, event_data
from fulmen_llm_proxy.capture.decode import decode_capture

API = ResponsesApi()
USAGE = {"input_tokens": 4, "input_tokens_details": {"cached_tokens": 1}, "output_tokens": 2, "total_tokens": 6}


def response(status: str, **fields: object) -> dict:
    return {"id": "resp_1", "object": "response", "status": status, "output": [], **fields}


def event(kind: str, **fields: object) -> bytes:
    return encode_event(json.dumps({"type": kind, **fields}).encode(), kind.encode())


ITEM = {"type": "message", "id": "msg_1", "content": [{"type": "output_text", "text": "hi"}]}
BEGIN = [
    event("response.created", sequence_number=0, response=response("in_progress")),
    event("response.output_text.delta", sequence_number=1, delta="hi"),
    event("response.output_item.done", sequence_number=2, output_index=0, item=ITEM),
]


def fed(events: list[bytes]) -> ResponsesReader:
    reader = API.reader(Asked())
    for each in events:
        assert reader.event(each) is each
    assert reader.end() == b""
    return reader


def test_a_request_keeps_every_byte_of_its_fields() -> None:
    body = b'{"model":"m","input":[{"x":1.50}],"max_output_tokens":7,"stream":true,"previous_response_id":"resp_0"}'
    request = API.parse(body)
    assert (request.stream, request.max_tokens) == (True, 7)
    assert API.body(request.fields, stream=True, capture=False) == body
    with pytest.raises(ArgumentInvalid, match="model"):
        API.parse(b'{"input":"x"}')


@pytest.mark.parametrize("status", ["completed", "incomplete", "failed"])
def test_the_last_event_says_that_the_answer_is_whole_and_what_it_used(status: str) -> None:
    last = response(status, usage=USAGE, output=[ITEM])
    reader = fed([*BEGIN, event(f"response.{status}", sequence_number=3, response=last)])
    assert reader.collected.complete
    assert reader.collected.error is (status == "failed")
    usage = decode_capture(reader.collected, default_version=0).usage
    assert (usage.prompt, usage.completion, usage.cached) == (4, 2, 1)
    assert json.loads(API.assemble(reader.collected.payloads)) == last


def test_a_stream_that_broke_off_is_put_together_from_its_finished_items() -> None:
    reader = fed(BEGIN)
    assert not reader.collected.complete
    assert json.loads(API.assemble(reader.collected.payloads)) == response("in_progress", output=[ITEM])


def test_an_error_event_is_an_error_and_one_that_is_no_json_is_malformed() -> None:
    assert fed([*BEGIN, event("error", message="x")]).collected.error
    assert fed([b"data: {nope\n\n"]).collected.malformed
    comment = fed([b": ping\n\n"]).collected
    assert (comment.malformed, comment.payloads) == (False, [])


def test_a_whole_answer_passes_as_it_is() -> None:
    reader = API.reader(Asked())
    body = b'{ "id": "resp_1", "status": "failed", "usage": {"input_tokens": 1, "output_tokens": 0}, "odd": 1.50 }'
    assert reader.whole(body) is body
    assert (reader.collected.complete, reader.collected.error) == (True, True)
    reader = API.reader(Asked())
    assert reader.whole(b"nope") == b"nope"
    assert (reader.collected.complete, reader.collected.malformed) == (False, True)


def test_the_error_that_ends_a_broken_stream_has_the_next_number() -> None:
    reader = fed(BEGIN)
    told = CallError(status=502, code="backend_unavailable", message="gone")
    event_bytes = error_event(told, API.name, API.dialect, sequence=reader.collected.sequence)
    error = ResponseErrorEvent.model_validate_json(event_data(event_bytes) or b"")
    assert (error.sequence_number, error.code, error.message) == (3, "backend_unavailable", "gone")
