"""What `fulmen trace` shows of a model call: what is new, tool calls and answers, of every API, and nothing that moves a terminal."""

from __future__ import annotations

import json
import unicodedata
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from fulmen.model_call import ModelCall
from fulmen_cli.rollout.contents import Conversations


def call(request: Any, answer: Any = None) -> ModelCall:
    """Makes a captured call with these texts."""
    return ModelCall(
        span_id=b"12345678",
        start_time_ns=0,
        agent_name="",
        model="m",
        policy="",
        prompt=b"",
        completion=b"",
        logprobs=b"",
        versions=(),
        finish_reason="stop",
        usable=False,
        unusable_reason="",
        temperature=None,
        request_json=json.dumps(request).encode(),
        response_json=json.dumps(answer or {}).encode(),
    )


def chat(*messages: Any, answer: Any) -> ModelCall:
    """Makes a call of the chat API."""
    return call({"messages": list(messages)}, {"choices": [{"index": 0, "message": answer}]})


USER = {"role": "user", "content": "What is 2+3?"}
CALLS = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 3}'}}],
}
RESULT = {"role": "tool", "tool_call_id": "1", "content": "5"}
ANSWER = {"role": "assistant", "content": "It is\n5."}


def test_each_call_shows_what_it_adds_to_the_conversation() -> None:
    said = Conversations()
    system = {"role": "system", "content": "Be brief."}
    assert said.lines(chat(system, USER, answer=CALLS)) == [
        "system: Be brief.", "user: What is 2+3?", 'assistant calls: add({"a": 2, "b": 3})',
    ]  # fmt: skip
    repeated = {**CALLS, "content": ""}
    assert said.lines(chat(system, USER, repeated, RESULT, answer=ANSWER)) == [
        "(3 earlier messages)", "tool: 5", "assistant: It is", "  5.",
    ]  # fmt: skip
    other = {"role": "user", "content": "Who?"}
    assert said.lines(chat(system, other, answer=ANSWER))[:2] == ["(1 earlier message)", "user: Who?"]


def test_messages_of_other_apis_are_shown_alike() -> None:
    blocks = [{"type": "text", "text": "Sure."}, {"type": "tool_use", "id": "1", "name": "add", "input": {"a": 2}}]
    lines = Conversations().lines(
        call({"system": "Be brief.", "messages": [USER]}, {"type": "message", "content": blocks})
    )
    assert lines == ["system: Be brief.", "user: What is 2+3?", "assistant: Sure.", 'assistant calls: add({"a": 2})']
    output = [{"type": "message", "content": [{"type": "output_text", "text": "5"}]}]
    assert Conversations().lines(call({"input": "What is 2+3?"}, {"output": output})) == [
        "user: What is 2+3?", "assistant: 5",
    ]  # fmt: skip


def test_an_image_is_named_and_not_shown() -> None:
    parts = [{"type": "text", "text": "See"}, {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]
    assert Conversations().lines(chat({"role": "user", "content": parts}, answer=ANSWER))[:2] == [
        "user: See", "  [image_url]",
    ]  # fmt: skip


def test_a_long_message_is_cut_unless_it_is_asked_for() -> None:
    long = chat({"role": "user", "content": "x" * 1500}, answer=ANSWER)
    assert Conversations().lines(long)[0] == f"user: {'x' * 1000}… (500 more characters: --full)"
    assert Conversations(max_chars=None).lines(long)[0] == f"user: {'x' * 1500}"


def test_nothing_that_was_said_moves_the_terminal() -> None:
    hostile = chat({"role": "a\x1b", "content": "\x1b]0;t\x07\r\x9b2J"}, answer={"content": "\u202eok", "role": "b"})
    assert all(sign.isprintable() for line in Conversations().lines(hostile) for sign in line)


HIDDEN = ("Cc", "Cf", "Cs", "Zl", "Zp")
KEPT = "\t\u200c\u200d"
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "tool_calls", "function", "type", "text", "messages"]), inner
        )
    ),
    max_leaves=8,
)


@given(messages=st.lists(JSON, max_size=3), answer=JSON)
def test_no_document_breaks_it(messages: list[Any], answer: Any) -> None:
    said = Conversations()
    for _ in range(2):
        lines = said.lines(call({"messages": messages}, {"choices": [{"index": 0, "message": answer}]}))
        assert not any(unicodedata.category(sign) in HIDDEN for line in lines for sign in line if sign not in KEPT)
