"""A Responses call by chat completions: requests, answers, streams, and that they agree."""

from __future__ import annotations

import copy
import itertools
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from fulmen.errors import ArgumentInvalid, BackendUnavailable
from fulmen_llm_proxy.apis.sse import EventSplitter, event_data
from fulmen_llm_proxy.translation.responses_to_chat import ResponsesToChat

JSON = dict[str, Any]
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
CHAT_REQUEST: TypeAdapter[Any] = TypeAdapter(CompletionCreateParamsNonStreaming)
FUNCTION = {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": True, "description": "d"}
USAGE = {
    "prompt_tokens": 5,
    "completion_tokens": 7,
    "total_tokens": 12,
    "prompt_tokens_details": {"cached_tokens": 2},
    "completion_tokens_details": {"reasoning_tokens": 3},
}


def raw(request: JSON) -> dict[str, msgspec.Raw]:
    return msgspec.json.decode(json.dumps({"model": "m", **request}), type=dict[str, msgspec.Raw])


def chat_of(**request: Any) -> JSON:
    chat = json.loads(msgspec.json.encode(ResponsesToChat().request(raw(request))))
    CHAT_REQUEST.validate_python(chat)
    return chat


def messages_of(*items: JSON) -> list[JSON]:
    return chat_of(input=list(items))["messages"]


def test_a_text_and_instructions_are_two_messages() -> None:
    assert chat_of(input="hi", instructions="be brief") == {
        "model": "m",
        "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}],
    }


def test_what_one_turn_produced_is_one_message_again() -> None:
    assert messages_of(
        {"role": "developer", "content": "rules"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "go"}]},
        {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {
            "type": "message",
            "id": "msg",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "I look.", "annotations": []}],
        },
        {"type": "function_call", "id": "fc", "call_id": "c1", "name": "look", "arguments": '{"a":1}'},
        {"type": "function_call", "call_id": "c2", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "one"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "two"}]},
        {"role": "assistant", "content": "Done."},
        {"role": "assistant", "content": "Really."},
    ) == [
        {"role": "system", "content": "rules"},
        {"role": "user", "content": "go"},
        {
            "role": "assistant",
            "reasoning_content": "hm",
            "content": "I look.",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"a":1}'}},
                {"id": "c2", "type": "function", "function": {"name": "look", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "one"},
        {"role": "tool", "tool_call_id": "c2", "content": "two"},
        {"role": "assistant", "content": "Done."},
        {"role": "assistant", "content": "Really."},
    ]


def test_reasoning_that_only_its_vendor_can_read_is_left_out() -> None:
    item = {
        "type": "reasoning",
        "id": "rs",
        "summary": [{"type": "summary_text", "text": "s"}],
        "encrypted_content": "x",
    }
    assert messages_of({"role": "user", "content": "a"}, item) == [{"role": "user", "content": "a"}]


def test_images_files_and_sound_are_parts_of_the_message() -> None:
    [message] = messages_of(
        {
            "role": "user",
            "content": [
                {"type": "input_text", "text": "see"},
                {"type": "input_image", "image_url": "data:image/png;base64,AA", "detail": "low"},
                {"type": "input_file", "file_data": "data:application/pdf;base64,AA", "filename": "a.pdf"},
                {"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}},
            ],
        }
    )
    assert message["content"] == [
        {"type": "text", "text": "see"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA", "detail": "low"}},
        {"type": "file", "file": {"file_data": "data:application/pdf;base64,AA", "filename": "a.pdf"}},
        {"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}},
    ]


def test_tools_and_their_choice() -> None:
    chat = chat_of(
        input="x", tools=[FUNCTION], tool_choice={"type": "function", "name": "look"}, parallel_tool_calls=False
    )
    function = {key: value for key, value in FUNCTION.items() if key != "type"}
    assert chat["tools"] == [{"type": "function", "function": function}]
    assert chat["tool_choice"] == {"type": "function", "function": {"name": "look"}}
    assert chat["parallel_tool_calls"] is False
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "look"}]}
    assert chat_of(input="x", tools=[FUNCTION], tool_choice=allowed)["tool_choice"] == {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "look"}}]},
    }
    without = chat_of(input="x", tools=[], tool_choice="auto", parallel_tool_calls=True)
    assert without.keys() == {"model", "messages"}


def test_options_are_renamed_and_unknown_fields_pass() -> None:
    schema = {"type": "object", "properties": {}}
    text_format = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    assert chat_of(
        input="x",
        max_output_tokens=9,
        temperature=0.5,
        top_p=None,
        reasoning={"effort": "low", "summary": "auto"},
        text={"format": text_format, "verbosity": "low"},
        metadata={"a": "b"},
        truncation="disabled",
        store=False,
        background=None,
        include=["reasoning.encrypted_content", "message.output_text.logprobs"],
        top_logprobs=2,
        top_k=4,
        stream_options={"include_obfuscation": False},
    ) == {
        "model": "m",
        "messages": [{"role": "user", "content": "x"}],
        "max_completion_tokens": 9,
        "temperature": 0.5,
        "reasoning_effort": "low",
        "verbosity": "low",
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}},
        "logprobs": True,
        "top_logprobs": 2,
        "top_k": 4,
    }
    assert chat_of(input="x", text={"format": {"type": "json_object"}})["response_format"] == {"type": "json_object"}


@pytest.mark.parametrize(
    ("request_fields", "named"),
    [
        ({"input": "x", "previous_response_id": "resp_1", "prompt": {"id": "p"}}, "`previous_response_id`, `prompt`"),
        ({"input": "x", "background": True}, "`background`"),
        ({"input": "x", "conversation": "conv"}, "`conversation`"),
        ({"input": "x", "truncation": "auto"}, "`truncation`"),
        (
            {"input": "x", "tools": [{"type": "web_search"}, {"type": "mcp", "name": "sh"}]},
            "'web_search' of type 'web_search'; the tool 'sh' of type 'mcp'",
        ),
        ({"input": "x", "tools": [FUNCTION], "tool_choice": {"type": "mcp"}}, "'mcp'"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, r"input\[0\] of type 'item_reference'"),
        (
            {
                "input": [
                    {"role": "user", "content": [{"type": "input_image", "file_id": "f"}, {"type": "input_video"}]}
                ]
            },
            r"content\[0\]: an image by `file_id`; input\[0\].content\[1\] of type 'input_video'",
        ),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_url": "u"}]}]}, "file_url"),
        ({"input": [{"role": "narrator", "content": "x"}]}, "narrator"),
        ({"input": 7}, "`input`"),
        ({"input": "x", "text": {"format": {"type": "grammar"}}}, "grammar"),
        ({}, "Missing fields: input"),
    ],
)
def test_what_chat_cannot_say_is_refused_and_all_of_it_is_named(request_fields: JSON, named: str) -> None:
    with pytest.raises(ArgumentInvalid, match=named):
        chat_of(**request_fields)


# --- answers ---


def message_answer(message: JSON, *, finish: str = "stop", logprobs: JSON | None = None) -> JSON:
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish, "logprobs": logprobs}
    return {
        "id": "chatcmpl-ab-1",
        "object": "chat.completion",
        "created": 17,
        "model": "served",
        "choices": [choice],
        "usage": USAGE,
    }


def whole_of(answer: JSON, **request: Any) -> JSON:
    translator = ResponsesToChat()
    translator.request(raw({"input": "x", **request}))
    response = json.loads(translator.whole(json.dumps(answer).encode()))
    Response.model_validate(response)
    return response


def stream_of(answer: JSON, pieces: int) -> bytes:
    """Returns the stream in which a server sends this answer, its texts in up to so many pieces."""
    choice = answer["choices"][0]
    message = choice["message"]
    deltas: list[JSON] = [{"role": "assistant", "content": ""}]
    deltas += [{"reasoning_content": part} for part in cut(message.get("reasoning_content") or "", pieces)]
    deltas += [{"content": part} for part in cut(message.get("content") or "", pieces)]
    deltas += [{"refusal": part} for part in cut(message.get("refusal") or "", pieces)]
    if message.get("annotations"):
        deltas.append({"annotations": message["annotations"]})
    calls = message.get("tool_calls") or []
    for index, call in enumerate(calls):
        head = {"name": call["function"]["name"], "arguments": ""}
        deltas.append({"tool_calls": [{"index": index, "id": call["id"], "type": "function", "function": head}]})
    # Pieces of several calls alternate, as some servers send them.
    rows = [cut(call["function"]["arguments"], pieces) for call in calls]
    for row in itertools.zip_longest(*rows):
        for index, part in enumerate(row):
            if part is not None:
                deltas.append({"tool_calls": [{"index": index, "function": {"arguments": part}}]})
    base = {"id": answer["id"], "object": "chat.completion.chunk", "created": 17, "model": "served"}
    events = [base | {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    events.append(base | {"choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]})
    events.append(base | {"choices": [], "usage": answer["usage"]})
    return b"".join(b"data: %s\n\n" % json.dumps(event).encode() for event in events) + b"data: [DONE]\n\n"


def cut(text: str, pieces: int) -> list[str]:
    size = max(1, -(-len(text) // pieces))
    return [text[start : start + size] for start in range(0, len(text), size)]


def translated(stream: bytes, edges: list[int], **request: Any) -> list[JSON]:
    translator = ResponsesToChat()
    translator.request(raw({"input": "x", "stream": True, **request}))
    splitter, out = EventSplitter(1 << 20), []
    bounds = sorted({0, len(stream), *(edge % (len(stream) + 1) for edge in edges)})
    for start, end in itertools.pairwise(bounds):
        for event in splitter.feed(stream[start:end]):
            out += translator.event(event)
    out += translator.end()
    documents = []
    for event in out:
        document = json.loads(event_data(event) or b"")
        assert event.startswith(b"event: %s\n" % document["type"].encode())
        EVENTS.validate_python(document)
        documents.append(document)
    assert [document["sequence_number"] for document in documents] == list(range(len(documents)))
    return documents


def replayed(events: list[JSON]) -> list[JSON]:
    """Puts the output together from the events alone, as a client does, and checks their order."""
    output: list[JSON] = []
    texts: dict[tuple[int, int], str] = {}
    for event in copy.deepcopy(events[2:-1]):
        place = event["output_index"]
        match event["type"].removeprefix("response."):
            case "output_item.added":
                assert place == len(output)
                assert event["item"]["status"] == "in_progress"
                output.append(event["item"])
            case "content_part.added":
                assert event["content_index"] == len(output[place]["content"])
                output[place]["content"].append(event["part"])
                texts[place, event["content_index"]] = ""
            case "output_text.delta" | "refusal.delta" | "reasoning_text.delta":
                texts[place, event["content_index"]] += event["delta"]
            case "function_call_arguments.delta":
                output[place]["arguments"] += event["delta"]
            case "function_call_arguments.done":
                assert output[place]["arguments"] == event["arguments"]
            case "output_text.done" | "reasoning_text.done":
                assert texts.pop((place, event["content_index"])) == event["text"]
            case "refusal.done":
                assert texts.pop((place, event["content_index"])) == event["refusal"]
            case "content_part.done":
                output[place]["content"][event["content_index"]] = event["part"]
            case "output_item.done":
                held = {**output[place], "status": event["item"]["status"]}
                assert held == event["item"]
                output[place] = event["item"]
            case "output_text.annotation.added":
                pass
            case unknown:
                raise AssertionError(unknown)
    assert not texts
    return output


CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"a": 1}'}}


def test_a_whole_answer_is_a_response_with_its_usage_and_the_requests_own_fields() -> None:
    annotation = {"type": "url_citation", "url_citation": {"start_index": 0, "end_index": 1, "title": "t", "url": "u"}}
    message = {"content": "hi", "reasoning_content": "hm", "tool_calls": [CALL], "annotations": [annotation]}
    response = whole_of(
        message_answer(message, finish="tool_calls"), tools=[FUNCTION], metadata={"k": "v"}, temperature=0.5
    )
    assert response["id"] == "resp_ab1"
    assert (response["status"], response["model"], response["created_at"]) == ("completed", "served", 17)
    assert [item["type"] for item in response["output"]] == ["reasoning", "message", "function_call"]
    assert response["output"][1]["content"] == [
        {
            "type": "output_text",
            "text": "hi",
            "annotations": [{"type": "url_citation", "start_index": 0, "end_index": 1, "title": "t", "url": "u"}],
            "logprobs": [],
        }
    ]
    assert response["output"][2]["call_id"] == "c1"
    assert response["usage"] == {
        "input_tokens": 5,
        "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0},
        "output_tokens": 7,
        "output_tokens_details": {"reasoning_tokens": 3},
        "total_tokens": 12,
    }
    assert (response["metadata"], response["temperature"], response["tools"]) == ({"k": "v"}, 0.5, [FUNCTION])
    assert response["store"] is False


@pytest.mark.parametrize(("finish", "reason"), [("length", "max_output_tokens"), ("content_filter", "content_filter")])
def test_an_answer_that_was_cut_is_incomplete_and_says_why(finish: str, reason: str) -> None:
    response = whole_of(message_answer({"content": "hal"}, finish=finish))
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": reason}
    assert response["output"][0]["status"] == "incomplete"
    assert (
        translated(stream_of(message_answer({"content": "hal"}, finish=finish), 2), [])[-1]["type"]
        == "response.incomplete"
    )


def test_an_empty_answer_still_has_a_message() -> None:
    [item] = whole_of(message_answer({"content": None}))["output"]
    assert item["content"][0]["text"] == ""


def test_logprobs_reach_the_caller_that_asked_for_them() -> None:
    entry = {"token": "hi", "logprob": -0.5, "bytes": [104], "top_logprobs": []}
    response = whole_of(message_answer({"content": "hi"}, logprobs={"content": [entry]}))
    assert response["output"][0]["content"][0]["logprobs"] == [entry]


text = st.text(max_size=20)
calls = st.lists(
    st.builds(
        lambda number, arguments: {
            "id": f"c{number}",
            "type": "function",
            "function": {"name": "f", "arguments": arguments},
        },
        st.integers(0, 9),
        text,
    ),
    max_size=3,
)
messages = st.fixed_dictionaries({"content": text, "reasoning_content": text, "refusal": text, "tool_calls": calls})


@given(message=messages, pieces=st.integers(1, 4), edges=st.lists(st.integers(0, 1 << 16), max_size=12))
def test_a_stream_however_cut_gives_the_response_of_the_whole_answer(
    message: JSON, pieces: int, edges: list[int]
) -> None:
    answer = message_answer(message, finish="tool_calls" if message["tool_calls"] else "stop")
    events = translated(stream_of(answer, pieces), edges)
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1]["type"] == "response.completed"
    assert events[-1]["response"] == whole_of(answer, stream=True)
    assert replayed(events) == events[-1]["response"]["output"]
    assert events == translated(stream_of(answer, pieces), [])


def test_a_broken_stream_ends_with_what_was_said_and_an_error() -> None:
    stream = stream_of(message_answer({"content": "hello"}), 1)
    cut_off = b"\n\n".join(stream.split(b"\n\n")[:2]) + b"\n\n"
    events = translated(cut_off, [])
    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["error"]["code"] == "server_error"
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == "hello"
    assert events[-1]["response"]["output"][0]["status"] == "incomplete"


@pytest.mark.parametrize(
    ("event", "code"),
    [
        (b'data: {"error": {"message": "slow down", "type": "rate_limit_error"}}\n\n', "rate_limit_exceeded"),
        (b'data: {"error": "gone"}\n\n', "server_error"),
        (b"data: {nonsense\n\n", "server_error"),
        (b"data: [DONE]\n\n", "server_error"),
        (b"", "server_error"),
    ],
)
def test_an_error_within_a_stream_is_a_failed_response_and_nothing_follows(event: bytes, code: str) -> None:
    rest = stream_of(message_answer({"content": "x"}), 1) if event and b"DONE" not in event else b""
    events = translated(event + rest, [])
    assert [e["type"] for e in events] == ["response.created", "response.in_progress", "response.failed"]
    assert events[-1]["response"]["error"]["code"] == code


def test_an_event_about_the_prompt_before_the_answer_is_not_its_beginning() -> None:
    answer = message_answer({"content": "hi"})
    first = {"id": "", "object": "", "created": 0, "model": "", "choices": [], "prompt_filter_results": [{}]}
    stream = b"data: %s\n\n" % json.dumps(first).encode() + stream_of(answer, 1)
    assert translated(stream, []) == translated(stream_of(answer, 1), [])


def test_a_comment_passes_since_it_keeps_the_connection_alive() -> None:
    translator = ResponsesToChat()
    translator.request(raw({"input": "x"}))
    assert translator.event(b": ping\n\n") == [b": ping\n\n"]


@pytest.mark.parametrize("body", [b"{", b"[]", b'{"choices": []}', b'{"choices": [{"message": 1}]}'])
def test_an_answer_that_is_no_chat_completion_is_the_backends_fault(body: bytes) -> None:
    translator = ResponsesToChat()
    translator.request(raw({"input": "x"}))
    with pytest.raises(BackendUnavailable):
        translator.whole(body)
