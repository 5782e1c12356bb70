"""The short way of putting a stream together gives what the long way gives."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from fulmen_llm_proxy.apis.chat_assembly import ChatEvent, add_chunk, assemble, assemble_answer, merged

EXTRA_CHOICE_KEYS = st.sampled_from([{}, {"logprobs": None}, {"logprobs": None, "stop_reason": None}])
EXTRA_TOP_KEYS = st.sampled_from([{}, {"system_fingerprint": "fp"}, {"service_tier": "default", "usage": None}])
ODD_EVENT = st.sampled_from(
    [
        {},
        {"id": "other"},
        {"model": "other"},
        {"unknown": {"deep": 1}},
        {"choices": []},
        {"choices": [{"index": 1, "delta": {"content": "b"}, "finish_reason": None}]},
        {"choices": [{"index": 0, "delta": {"content": None}, "finish_reason": None}]},
        {"choices": [{"index": 0, "delta": {"content": "x"}, "finish_reason": "length"}]},
        {"choices": [{"index": 0, "delta": {"reasoning_content": "hm"}, "finish_reason": None}]},
        {
            "choices": [
                {
                    "index": 0,
                    "delta": {"tool_calls": [{"index": 0, "id": "c", "function": {"name": "f", "arguments": "{"}}]},
                    "finish_reason": None,
                }
            ]
        },
    ]
)


def stream(texts: list[str], top: dict[str, Any], choice: dict[str, Any], odd: dict[str, Any], at: int) -> list[bytes]:
    def event(delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
        said = {"index": 0, "delta": delta, "finish_reason": finish, **choice}
        return {"id": "c", "object": "chat.completion.chunk", "created": 7, "model": "m", "choices": [said], **top}

    events = [event({"role": "assistant", "content": ""}), *(event({"content": text}) for text in texts)]
    events.append(event({}, "stop"))
    if odd:
        place = at % (len(events) + 1)
        events.insert(place, {**event({"content": "odd"}), **odd})
    return [json.dumps(e).encode() for e in events]


@given(
    texts=st.lists(st.text(max_size=6), max_size=30),
    top=EXTRA_TOP_KEYS,
    choice=EXTRA_CHOICE_KEYS,
    odd=ODD_EVENT,
    at=st.integers(0, 40),
)
def test_the_short_way_equals_the_long_way(
    texts: list[str], top: dict[str, Any], choice: dict[str, Any], odd: dict[str, Any], at: int
) -> None:
    payloads = stream(texts, top, choice, odd, at)
    assert json.loads(assemble_answer(payloads)) == json.loads(
        assemble(payloads, ChatEvent, "chat.completion", add_chunk)
    )


def test_plain_events_take_the_short_way() -> None:
    payloads = stream([f"t{i} " for i in range(64)], {}, {"logprobs": None}, {}, 0)
    assert len(merged(payloads)) == 5
    content = json.loads(assemble_answer(payloads))["choices"][0]["message"]["content"]
    assert content == "".join(f"t{i} " for i in range(64))


def test_events_that_are_no_json_are_left_out() -> None:
    payloads = stream(["a"] * 20, {}, {}, {}, 0)
    payloads.insert(4, b"{broken")
    assert json.loads(assemble_answer(payloads))["choices"][0]["message"]["content"] == "a" * 20
