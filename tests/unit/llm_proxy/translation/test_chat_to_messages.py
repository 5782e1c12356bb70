"""An agent that speaks chat completions finds the same conversation, tools and answers on a backend of Anthropic's."""

from __future__ import annotations

import json
from typing import Any

import pytest
from anthropic.types import Message
from openai.types.chat import ChatCompletion

from fulmen.errors import ArgumentInvalid, BackendUnavailable
from fulmen_llm_proxy.apis.api import decode_fields, encode
from fulmen_llm_proxy.translation.chat_to_messages import DEFAULT_MAX_TOKENS, ChatToMessages
from tests.support.llm_proxy.vendors import anthropic as vendor
from tests.support.llm_proxy.vendors.anthropic import SAID_THOUGHT, message, said, used

JSON = dict[str, Any]
DATA_URL = "data:image/png;base64,iVBORw=="
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw=="}}
FUNCTION = {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}}
TOOL = {"type": "function", "function": FUNCTION}


def translator() -> ChatToMessages:
    return ChatToMessages(now=lambda: 1_700_000_000.5)


def to_messages(**fields: Any) -> JSON:
    request = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
    told = json.loads(encode(translator().request(decode_fields(json.dumps(request).encode()))))
    vendor.check(told, vendor.CREATE_FIELDS)
    return told


def text(said: str) -> JSON:
    return {"type": "text", "text": said}


def call(name: str = "add", call_id: str = "call_1", arguments: str = "{}") -> JSON:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


# Requests.


def test_a_plain_request_keeps_its_words_and_its_limits() -> None:
    assert to_messages(temperature=0.5, top_p=0.9, stop="x", max_completion_tokens=5, user="u", seed=3) == {
        "model": "m",
        "top_p": 0.9,
        "messages": [{"role": "user", "content": [text("hi")]}],
        "max_tokens": 5,
        "temperature": 0.5,
        "stop_sequences": ["x"],
        "metadata": {"user_id": "u"},
    }


def test_a_limit_is_always_there_and_the_temperature_within_range() -> None:
    told = to_messages(temperature=1.7, stop=["a", "b"])
    assert (told["max_tokens"], told["temperature"], told["stop_sequences"]) == (DEFAULT_MAX_TOKENS, 1.0, ["a", "b"])
    assert to_messages(max_tokens=3)["max_tokens"] == 3


def test_system_and_developer_messages_become_the_system_prompt() -> None:
    told = to_messages(
        messages=[
            {"role": "system", "content": "a"},
            {"role": "user", "content": "hi"},
            {"role": "developer", "content": [text("b")]},
        ]
    )
    assert told["system"] == [text("a"), text("b")]
    assert told["messages"] == [{"role": "user", "content": [text("hi")]}]


def test_calls_results_and_what_the_user_says_after_them_make_two_turns() -> None:
    told = to_messages(
        tools=[TOOL],
        messages=[
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "I call.", "tool_calls": [call(arguments='{"a": 1}'), call(call_id="c2")]},
            {"role": "tool", "tool_call_id": "call_1", "content": "3"},
            {
                "role": "tool",
                "tool_call_id": "c2",
                "content": [text("x"), {"type": "image_url", "image_url": {"url": DATA_URL}}],
            },
            {"role": "user", "content": "and now?"},
        ],
    )
    assert told["messages"][1]["content"] == [
        text("I call."),
        {"type": "tool_use", "id": "call_1", "name": "add", "input": {"a": 1}},
        {"type": "tool_use", "id": "c2", "name": "add", "input": {}},
    ]
    assert told["messages"][2]["content"] == [
        {"type": "tool_result", "tool_use_id": "call_1", "content": "3"},
        {"type": "tool_result", "tool_use_id": "c2", "content": [text("x"), IMAGE]},
        text("and now?"),
    ]


def test_ids_that_repeat_or_hold_strange_letters_are_made_right_on_both_ends() -> None:
    round_ = [
        {"role": "assistant", "content": None, "tool_calls": [call(call_id="call:1")]},
        {"role": "tool", "tool_call_id": "call:1", "content": "r"},
    ]
    turns = to_messages(tools=[TOOL], messages=[{"role": "user", "content": "hi"}, *round_, *round_])["messages"]
    assert [turn["content"][0].get("id") or turn["content"][0].get("tool_use_id") for turn in turns[1:]] == [
        "call_1",
        "call_1",
        "call_1_2",
        "call_1_2",
    ]


def test_a_conversation_with_calls_but_without_tools_defines_those_that_were_called() -> None:
    told = to_messages(
        messages=[
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": None, "tool_calls": [call()]},
            {"role": "tool", "tool_call_id": "call_1", "content": ""},
        ]
    )
    assert told["tools"] == [{"name": "add", "input_schema": {"type": "object"}}]
    assert told["tool_choice"] == {"type": "none"}


def test_images_and_files_become_blocks_and_empty_texts_go() -> None:
    file = {"type": "file", "file": {"filename": "a.pdf", "file_data": "data:application/pdf;base64,QQ=="}}
    parts = [text(""), text("see"), {"type": "image_url", "image_url": {"url": DATA_URL, "detail": "low"}}, file]
    link = {"type": "image_url", "image_url": {"url": "https://x/y.png"}}
    told = to_messages(messages=[{"role": "user", "content": [*parts, link]}, {"role": "assistant", "content": ""}])
    pdf = {"type": "base64", "media_type": "application/pdf", "data": "QQ=="}
    assert told["messages"] == [
        {
            "role": "user",
            "content": [
                text("see"),
                IMAGE,
                {"type": "document", "source": pdf, "title": "a.pdf"},
                {"type": "image", "source": {"type": "url", "url": "https://x/y.png"}},
            ],
        }
    ]


def test_thinking_that_was_handed_out_is_handed_back() -> None:
    thoughts = [
        {"index": 0, "type": "thinking", "thinking": "hm", "signature": "s"},
        {"type": "redacted_thinking", "data": "d"},
        {"type": "thinking", "thinking": "unsigned"},
    ]
    said = {"role": "assistant", "content": "so", "reasoning_content": "hm", "thinking_blocks": thoughts}
    assert to_messages(messages=[{"role": "user", "content": "hi"}, said])["messages"][1]["content"] == [
        {"type": "thinking", "thinking": "hm", "signature": "s"},
        {"type": "redacted_thinking", "data": "d"},
        text("so"),
    ]


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({}, None),
        ({"tool_choice": "auto"}, {"type": "auto"}),
        ({"tool_choice": "none", "parallel_tool_calls": False}, {"type": "none"}),
        ({"tool_choice": "required"}, {"type": "any"}),
        ({"tool_choice": {"type": "function", "function": {"name": "add"}}}, {"type": "tool", "name": "add"}),
        ({"parallel_tool_calls": True}, None),
        ({"parallel_tool_calls": False}, {"type": "auto", "disable_parallel_tool_use": True}),
        (
            {"tool_choice": "required", "parallel_tool_calls": False},
            {"type": "any", "disable_parallel_tool_use": True},
        ),
    ],
)
def test_tools_and_how_they_are_chosen(asked: JSON, told: JSON | None) -> None:
    strict = {"type": "function", "function": {"name": "bare", "strict": True}}
    read = to_messages(tools=[TOOL, strict], **asked)
    assert read["tools"] == [
        {"name": "add", "description": "Adds.", "input_schema": {"type": "object", "properties": {}}},
        {"name": "bare", "input_schema": {"type": "object", "properties": {}}, "strict": True},
    ]
    assert read.get("tool_choice") == told


def test_a_schema_and_an_effort_are_the_output_config() -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    told = to_messages(response_format=schema, reasoning_effort="minimal")
    assert told["output_config"] == {"effort": "low", "format": {"type": "json_schema", "schema": {"type": "object"}}}
    assert to_messages(reasoning_effort="none")["thinking"] == {"type": "disabled"}
    assert "output_config" not in to_messages(response_format={"type": "text"})


def test_fields_of_messages_pass_and_those_of_openais_service_do_not() -> None:
    told = to_messages(
        thinking={"type": "enabled", "budget_tokens": 1024},
        top_k=5,
        store=True,
        metadata={"a": "b"},
        n=1,
        frequency_penalty=0,
        logprobs=False,
        service_tier="auto",
        stream_options={"include_usage": True},
    )
    assert told.keys() == {"model", "messages", "max_tokens", "thinking", "top_k"}


def test_everything_that_cannot_be_said_is_named_at_once() -> None:
    with pytest.raises(ArgumentInvalid) as refused:
        to_messages(
            messages=[
                {"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]},
                {"role": "user", "content": [{"type": "file", "file": {"file_id": "f"}}]},
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/svg,<x>"}}]},
                {"role": "function", "content": "x"},
            ],
            tools=[{"type": "custom", "custom": {"name": "x"}}],
            tool_choice={"type": "allowed_tools"},
            response_format={"type": "json_object"},
            n=2,
            logprobs=True,
            frequency_penalty=0.5,
            modalities=["text", "audio"],
        )
    named = (
        "messages[0].content[0]",
        "messages[1].content[0]",
        "messages[2].content[0]",
        "messages[3].role",
        "tools[0]",
    )
    for place in (*named, "tool_choice", "response_format", "n ", "logprobs", "frequency_penalty", "modalities"):
        assert place in str(refused.value)


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": "hi"},
        {"messages": [{"role": "user", "content": 3}]},
        {"tools": {}},
        {"max_tokens": "9"},
        {"stop": 3},
        {"temperature": "hot"},
        {"tool_choice": 3, "tools": [TOOL]},
    ],
)
def test_a_malformed_request_is_refused(fields: JSON) -> None:
    with pytest.raises(ArgumentInvalid):
        to_messages(**fields)


# Whole answers.


def answered(answer: Message) -> JSON:
    body = translator().whole(answer.model_dump_json(exclude_unset=True).encode())
    ChatCompletion.model_validate_json(body, strict=True)
    return json.loads(body)


def test_an_answer_is_a_chat_completion_with_its_usage() -> None:
    assert answered(message(said("hel"), said("lo"))) == {
        "id": "chatcmpl-7",
        "object": "chat.completion",
        "created": 1_700_000_000,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "hello", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": 11,
            "completion_tokens": 5,
            "total_tokens": 16,
            "prompt_tokens_details": {"cached_tokens": 6, "cache_write_tokens": 1},
        },
    }


@pytest.mark.parametrize(
    ("reason", "finish"),
    [
        ("end_turn", "stop"),
        ("stop_sequence", "stop"),
        ("pause_turn", "stop"),
        ("max_tokens", "length"),
        ("model_context_window_exceeded", "length"),
        ("tool_use", "tool_calls"),
        ("refusal", "content_filter"),
        (None, "stop"),
    ],
)
def test_every_stop_reason_is_a_finish_reason(reason: Any, finish: str) -> None:
    sequence = "END" if reason == "stop_sequence" else None
    choice = answered(message(said("x"), stop_reason=reason, stop_sequence=sequence))["choices"][0]
    assert (choice["finish_reason"], choice.get("stop_reason")) == (finish, sequence)


def test_thoughts_and_parallel_calls_are_told_in_their_fields() -> None:
    told = answered(message(SAID_THOUGHT, said("so"), used(a=1), used("toolu_2", "sub"), stop_reason="tool_use"))
    read = told["choices"][0]["message"]
    assert read["reasoning_content"] == "hm"
    assert read["thinking_blocks"] == [{"type": "thinking", "thinking": "hm", "signature": "s"}]
    assert [(c["id"], c["function"]["name"], json.loads(c["function"]["arguments"])) for c in read["tool_calls"]] == [
        ("toolu_1", "add", {"a": 1}),
        ("toolu_2", "sub", {}),
    ]


@pytest.mark.parametrize(
    "body", [b"{", b"[]", b"{}", b'{"type": "error"}', b'{"type": "message", "content": 3}', b"\xff"]
)
def test_what_is_no_answer_is_the_backends_failure(body: bytes) -> None:
    with pytest.raises(BackendUnavailable):
        translator().whole(body)
