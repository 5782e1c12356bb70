"""A whole chat completion, said as a stream."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from fulmen_llm_proxy.apis.chat_assembly import assemble_answer
from fulmen_llm_proxy.apis.chat_events import WholeAsEvents, chunks_of
from fulmen_llm_proxy.apis.collected import Asked
from fulmen_llm_proxy.apis.sse import DONE, encode_event

texts = st.text(max_size=8)
calls = st.builds(
    lambda name, arguments: {"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}},
    texts,
    texts,
)
messages = st.one_of(
    texts.map(lambda text: {"role": "assistant", "content": text}),
    st.lists(calls, min_size=1, max_size=3).map(
        lambda made: {"role": "assistant", "content": None, "tool_calls": made}
    ),
)


def answer_of(said: list[dict[str, Any]]) -> dict[str, Any]:
    choices = [
        {"index": i, "message": message, "logprobs": None, "finish_reason": "stop", "matched_stop": 7}
        for i, message in enumerate(said)
    ]
    return {"id": "x", "object": "chat.completion", "model": "m", "choices": choices, "usage": {"total_tokens": 3}}


@given(said=st.lists(messages, min_size=1, max_size=3))
def test_the_events_of_an_answer_amount_to_the_answer(said: list[dict[str, Any]]) -> None:
    answer = answer_of(said)
    events = chunks_of(json.dumps(answer).encode(), usage=True)
    assert events[-1] == DONE
    assembled = json.loads(assemble_answer(events[:-1]))
    for choice in assembled["choices"]:
        for call in choice["message"].get("tool_calls") or ():
            call.pop("index", None)
    assert assembled == answer


def test_the_usage_is_told_only_if_asked_for() -> None:
    body = json.dumps(answer_of([{"role": "assistant", "content": "hi"}])).encode()
    assert not any(b"usage" in event for event in chunks_of(body, usage=False))


def test_an_answer_that_is_none_is_handed_on_as_one_event_and_marked() -> None:
    reader = WholeAsEvents(Asked())
    assert reader.event(b"<html>\n</html>") == encode_event(b"<html> </html>")
    assert reader.collected.malformed
    assert not reader.collected.complete
