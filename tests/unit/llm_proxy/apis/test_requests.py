"""What the backend gets in place of the agent's request."""

from __future__ import annotations

import json

import pytest

from fulmen.errors import ArgumentInvalid
from fulmen_llm_proxy.apis.api import routed_fields
from fulmen_llm_proxy.apis.chat import ChatApi
from fulmen_llm_proxy.routing.codec import parse_overrides

CHAT = ChatApi()

REQUEST = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "hi"}],
    "temperature": 0.7,
    "vendor": {"deep": [1]},
    "stream_options": {"chunk": 1},
}


def sent(request: dict, *, overrides: str = "", capture: bool = True) -> dict:
    parsed = CHAT.parse(json.dumps(request).encode())
    fields = routed_fields(
        parsed.fields, model="served", asked_model=parsed.model, overrides=parse_overrides(overrides)
    )
    return json.loads(CHAT.body(fields, stream=parsed.stream, capture=capture))


def test_the_capture_asks_for_ids_and_logprobs_and_keeps_everything_else() -> None:
    assert sent(REQUEST) == REQUEST | {"model": "served", "return_token_ids": True, "logprobs": True}


def test_a_captured_stream_also_asks_for_the_usage() -> None:
    body = sent(REQUEST | {"stream": True})
    assert body["stream_options"] == {"chunk": 1, "include_usage": True}
    assert sent(REQUEST | {"stream": True, "stream_options": None})["stream_options"] == {"include_usage": True}


def test_without_capture_only_the_model_and_the_overrides_change() -> None:
    body = sent(REQUEST, overrides='{"temperature": 0, "top_p": 0.5}', capture=False)
    assert body == REQUEST | {"model": "served", "temperature": 0, "top_p": 0.5}


def test_a_field_that_the_route_sets_to_null_does_not_reach_the_backend() -> None:
    overrides = '{"top_k": null, "min_p": null, "top_p": 1.0}'
    body = sent(REQUEST | {"top_k": 5, "top_p": 0.5}, overrides=overrides, capture=False)
    assert body == REQUEST | {"model": "served", "top_p": 1.0}


def test_what_the_agent_asked_for_is_known() -> None:
    asked = CHAT.parse(
        json.dumps(
            REQUEST | {"logprobs": True, "return_token_ids": True, "stream_options": {"include_usage": True}}
        ).encode()
    ).asked
    assert (asked.logprobs, asked.token_ids, asked.stream_usage) == (True, True, True)


@pytest.mark.parametrize("field", ["model", "messages", "stream", "stream_options", "return_token_ids", "logprobs"])
def test_a_route_may_not_override_what_is_the_callers_or_the_captures(field: str) -> None:
    with pytest.raises(ArgumentInvalid, match=field):
        parse_overrides(json.dumps({field: None}))


@pytest.mark.parametrize("text", ["[]", "1", "{", '"x"', '{"a": ' + "[" * 100_000])
def test_overrides_that_are_no_object_are_refused(text: str) -> None:
    with pytest.raises(ArgumentInvalid):
        parse_overrides(text)
