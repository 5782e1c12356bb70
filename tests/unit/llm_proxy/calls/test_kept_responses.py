"""Ids of kept responses: where they lead, for whom, and that nothing else of an answer changes."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulmen_llm_proxy.apis.responses import ResponsesReader
from fulmen_llm_proxy.apis.sealed_responses import SealedReader, sealed_answer
from fulmen_llm_proxy.apis.sse import encode_event
from fulmen_llm_proxy.calls.responses.response_ids import ResponseIds, StoredResponse

IDS = ResponseIds(lambda: (b"a secret of the deployment",))


@given(raw_id=st.text(min_size=1, max_size=80), backend_id=st.from_regex(r"[a-z0-9._-]{1,63}", fullmatch=True))
def test_an_id_leads_back_to_its_backend_for_its_own_project_alone(raw_id: str, backend_id: str) -> None:
    sealed = IDS.sealed(raw_id, backend_id=backend_id, project="projects/a")
    assert IDS.opened(sealed, project="projects/a") == StoredResponse(backend_id=backend_id, raw_id=raw_id)
    assert IDS.opened(sealed, project="projects/b") is None
    assert ResponseIds(lambda: (b"another secret",)).opened(sealed, project="projects/a") is None


@pytest.mark.parametrize("forged", ["", "resp_1", "resp_1~one", "resp_1~one~", "resp_1~one~é", "~~"])
def test_an_id_that_was_not_made_here_leads_nowhere(forged: str) -> None:
    assert IDS.opened(forged, project="projects/a") is None


def seal(raw_id: str) -> str:
    return f"<{raw_id}>"


def test_only_the_ids_of_an_answer_change() -> None:
    body = b'{"id":"r1","odd":1.50,"previous_response_id":null,"output":[{"id":"msg_1"}]}'
    assert sealed_answer(body, seal) == body.replace(b'"r1"', b'"<r1>"')
    assert sealed_answer(b'{"previous_response_id":"r0"}', seal) == b'{"previous_response_id":"<r0>"}'
    for other in (b"nope", b"[]", b'{"id":7}'):
        assert sealed_answer(other, seal) == other


def test_events_that_hold_the_response_are_sealed_and_all_others_pass_as_they_are() -> None:
    reader = SealedReader(ResponsesReader(), seal)
    delta = encode_event(b'{"type":"response.output_text.delta", "delta":"\\"response\\"", "item_id": "m"}', b"x")
    assert reader.event(delta) is delta
    document = {"type": "response.completed", "sequence_number": 3, "response": {"id": "r1", "status": "completed"}}
    passed = reader.event(encode_event(json.dumps(document).encode(), b"response.completed"))
    assert passed == (
        b'event: response.completed\ndata: {"type":"response.completed","sequence_number":3,'
        b'"response":{"id":"<r1>","status":"completed"}}\n\n'
    )
    assert reader.collected.complete
    assert json.loads(reader.collected.payloads[0])["response"]["id"] == "r1"
    for broken in (b'data: {"response"\n\n', b'data: {"response": 7, "type": "x"}\n\n', b'data: {"response": {}}\n\n'):
        assert reader.event(broken) == broken
    assert reader.end() == b""
