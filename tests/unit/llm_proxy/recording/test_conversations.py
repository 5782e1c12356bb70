"""A call's hashes find the earlier call that it continues, whatever clients do to an answer that they send back."""

from __future__ import annotations

from typing import Any

import pytest

from fulmen_llm_proxy.recording.conversations import MAX_PREFIXES, chain

USER: dict[str, Any] = {"role": "user", "content": "Hello"}


def call(arguments: str, call_id: str = "1") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "look", "arguments": arguments}}


@pytest.mark.parametrize(
    ("answer", "echoed"),
    [
        ({"content": "Hi", "refusal": None, "annotations": []}, {"content": "Hi"}),
        ({"content": None, "tool_calls": [call('{"a":1}')]}, {"content": "", "tool_calls": [call('{"a": 1}', "2")]}),
        ({"content": "Hi", "reasoning_content": "Hm"}, {"content": "Hi", "tool_calls": None}),
    ],
)
def test_an_answer_is_found_again_in_the_next_request(answer: dict[str, Any], echoed: dict[str, Any]) -> None:
    end, _ = chain([USER], {"role": "assistant", **answer})
    _, prefixes = chain([USER, {"role": "assistant", **echoed}, USER], None)
    assert prefixes == [end]


@pytest.mark.parametrize(
    "other",
    [
        [{"role": "user", "content": "Hello!"}],
        [{"role": "system", "content": "x"}, USER],
        [{"role": "system", "content": "Hello"}],
    ],
)
def test_other_messages_have_another_hash(other: list[dict[str, Any]]) -> None:
    answer = {"role": "assistant", "content": "Hi"}
    assert chain(other, answer)[0] != chain([USER], answer)[0]


def test_a_long_conversation_has_its_longest_beginnings() -> None:
    messages = [USER, {"role": "assistant", "content": "Hi"}] * 40
    _, prefixes = chain(messages, None)
    assert len(prefixes) == MAX_PREFIXES
    assert prefixes[0] == chain(messages[:-1], messages[-1])[0]
