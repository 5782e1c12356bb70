"""An agent that speaks Messages finds the same conversation, tools and answers on a backend that speaks chat."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fulmen.errors import ArgumentInvalid, BackendUnavailable
from fulmen_llm_proxy.apis.api import decode_fields, encode
from fulmen_llm_proxy.translation.chat_to_messages import ChatToMessages
from fulmen_llm_proxy.translation.messages_to_chat import MessagesToChat
from tests.support.llm_proxy.chat_answers import completion, text, tool_call, tool_use, user
from tests.support.llm_proxy.vendors.anthropic_dialect import JSON, message_of

PNG = {"type": "base64", "media_type": "image/png", "data": "iVBORw=="}
DATA_URL = "data:image/png;base64,iVBORw=="
IMAGE = {"type": "image", "source": PNG}


def to_chat(**fields: Any) -> JSON:
    request = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}], **fields}
    return json.loads(encode(MessagesToChat().request(decode_fields(json.dumps(request).encode()))))


def chat_turns(*turns: JSON) -> list[JSON]:
    return to_chat(messages=list(turns))["messages"]


# Requests.


def test_a_plain_request_keeps_its_words_and_its_limits() -> None:
    assert to_chat(system="Be brief.", temperature=0.5, top_p=0.9, top_k=3, stop_sequences=["x"], stream=True) == {
        "model": "m",
        "stream": True,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 3,
        "stop": ["x"],
        "max_completion_tokens": 9,
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}],
    }


def test_fields_that_only_engines_know_pass_and_those_of_anthropics_service_do_not() -> None:
    told = to_chat(seed=4, min_p=0.1, thinking={"type": "adaptive"}, service_tier="auto", cache_control=None)
    assert {"seed", "min_p"} <= told.keys()
    assert not {"thinking", "service_tier", "cache_control"} & told.keys()


def test_system_blocks_stay_parts_and_lose_their_cache_marks() -> None:
    marked = {**text("a"), "cache_control": {"type": "ephemeral"}}
    assert to_chat(system=[marked, text("b")])["messages"][0] == {"role": "system", "content": [text("a"), text("b")]}


def test_images_become_addresses() -> None:
    link = {"type": "image", "source": {"type": "url", "url": "https://x/y.png"}}
    assert chat_turns(user(text("see"), IMAGE, link)) == [
        user(
            text("see"),
            {"type": "image_url", "image_url": {"url": DATA_URL}},
            {"type": "image_url", "image_url": {"url": "https://x/y.png"}},
        )
    ]


def test_documents_become_files_or_their_text() -> None:
    pdf = {"type": "document", "title": "a.pdf", "source": {**PNG, "media_type": "application/pdf"}}
    plain = {"type": "document", "title": "T", "source": {"type": "text", "media_type": "text/plain", "data": "d"}}
    nested = {"type": "document", "source": {"type": "content", "content": [text("c")]}}
    file = {"filename": "a.pdf", "file_data": "data:application/pdf;base64,iVBORw=="}
    assert chat_turns(user(pdf, plain, nested)) == [
        user({"type": "file", "file": file}, text("T"), text("d"), text("c"))
    ]


def test_parallel_tool_calls_and_their_results_keep_order_and_ids() -> None:
    turns = chat_turns(
        {"role": "assistant", "content": [text("I call."), tool_use(a=1), tool_use("sub", "toolu_2")]},
        user(
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": "3"},
            {"type": "tool_result", "tool_use_id": "toolu_2", "content": [text("x"), text("y")], "is_error": True},
            text("and now?"),
        ),
    )
    assert turns == [
        {
            "role": "assistant",
            "content": "I call.",
            "tool_calls": [tool_call(arguments='{"a": 1}'), tool_call("sub", "toolu_2")],
        },
        {"role": "tool", "tool_call_id": "toolu_1", "content": "3"},
        {"role": "tool", "tool_call_id": "toolu_2", "content": "Error: x\ny"},
        {"role": "user", "content": "and now?"},
    ]


def test_the_images_of_a_tools_result_follow_the_results_in_the_users_message() -> None:
    turns = chat_turns(
        user(
            {"type": "tool_result", "tool_use_id": "a", "content": [text("shot"), IMAGE]},
            {"type": "tool_result", "tool_use_id": "b"},
        )
    )
    assert turns == [
        {"role": "tool", "tool_call_id": "a", "content": "shot"},
        {"role": "tool", "tool_call_id": "b", "content": ""},
        user({"type": "image_url", "image_url": {"url": DATA_URL}}),
    ]


def test_thinking_goes_back_to_the_field_that_it_came_from_and_nowhere_else() -> None:
    assistant = {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "ours", "signature": "reasoning"},
            {"type": "thinking", "thinking": "theirs", "signature": "c2lnbmVk"},
            {"type": "redacted_thinking", "data": "xx"},
            tool_use(),
        ],
    }
    assert chat_turns(assistant, user({"type": "tool_result", "tool_use_id": "toolu_1"}))[0] == {
        "role": "assistant",
        "content": None,
        "reasoning": "ours",
        "tool_calls": [tool_call()],
    }


def test_a_conversation_that_ends_with_the_assistant_is_gone_on_with() -> None:
    told = to_chat(messages=[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "The answer is"}])
    assert told["messages"][-1] == {"role": "assistant", "content": "The answer is"}
    assert (told["continue_final_message"], told["add_generation_prompt"]) == (True, False)


@pytest.mark.parametrize(
    ("choice", "told"),
    [
        ({"type": "auto"}, {"tool_choice": "auto"}),
        ({"type": "any"}, {"tool_choice": "required"}),
        ({"type": "none"}, {"tool_choice": "none"}),
        ({"type": "tool", "name": "add"}, {"tool_choice": {"type": "function", "function": {"name": "add"}}}),
        (
            {"type": "auto", "disable_parallel_tool_use": True},
            {"tool_choice": "auto", "parallel_tool_calls": False},
        ),
    ],
)
def test_tools_and_how_they_are_chosen(choice: JSON, told: JSON) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "$defs": {}}
    tool = {"name": "add", "description": "Adds.", "input_schema": schema, "strict": True, "cache_control": None}
    function = {"name": "add", "description": "Adds.", "parameters": schema, "strict": True}
    read = to_chat(tools=[tool], tool_choice=choice)
    assert read["tools"] == [{"type": "function", "function": function}]
    assert {name: read[name] for name in ("tool_choice", "parallel_tool_calls") if name in read} == told


def test_a_deferred_tool_is_offered_from_the_call_on_whose_result_refers_to_it() -> None:
    tools = [{"name": "find"}, {"name": "fetch", "defer_loading": True}, {"name": "never", "defer_loading": True}]
    asked: list[JSON] = [user(text("go")), {"role": "assistant", "content": [tool_use("find", "t1")]}]
    found = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "tool_reference", "tool_name": "fetch"}]}

    before, after = to_chat(tools=tools), to_chat(tools=tools, messages=[*asked, user(found)])

    assert [tool["function"]["name"] for tool in before["tools"]] == ["find"]
    assert [tool["function"]["name"] for tool in after["tools"]] == ["find", "fetch"]
    told = {"role": "tool", "tool_call_id": "t1", "content": "The tool fetch can be called now."}
    assert after["messages"][-1] == told


def test_a_schema_an_effort_and_a_user_have_their_own_fields() -> None:
    config = {"effort": "high", "format": {"type": "json_schema", "schema": {"type": "object"}}}
    told = to_chat(output_config=config, metadata={"user_id": "u"})
    assert told["reasoning_effort"] == "high"
    assert told["user"] == "u"
    schema = {"name": "answer", "schema": {"type": "object"}, "strict": True}
    assert told["response_format"] == {"type": "json_schema", "json_schema": schema}


def test_everything_that_cannot_be_said_is_named_at_once() -> None:
    with pytest.raises(ArgumentInvalid) as refused:
        to_chat(
            messages=[
                user({"type": "image", "source": {"type": "file", "file_id": "f"}}),
                {"role": "assistant", "content": [{"type": "server_tool_use", "id": "s", "name": "web_search"}]},
            ],
            tools=[{"type": "web_search_20250305", "name": "web_search"}],
            mcp_servers=[{"name": "x"}],
        )
    for named in ("messages[0].content[0]", "messages[1].content[0]", "tools[0]", "mcp_servers"):
        assert named in str(refused.value)


def test_a_thread_is_refused_with_the_code_that_makes_the_client_send_the_whole_conversation() -> None:
    with pytest.raises(ArgumentInvalid) as refused:
        to_chat(thread={"type": "create"})
    assert refused.value.metadata == {"vendor_code": "thread_unsupported_request"}
    assert "thread" not in to_chat(thread=None)


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{"role": "user"}]},
        {"messages": "hi"},
        {"messages": [{"role": "user", "content": 3}]},
        {"messages": [user({"type": "tool_result", "tool_use_id": "a", "content": 3})]},
        {"messages": [{"role": "robot", "content": "x"}]},
        {"tools": {}},
        {"max_tokens": "9"},
        {"system": 1},
        {"tool_choice": {"type": "tool"}},
    ],
)
def test_a_malformed_request_is_refused(fields: JSON) -> None:
    with pytest.raises(ArgumentInvalid):
        to_chat(**fields)


# Whole answers.


def answered(message: JSON, finish: str | None = "stop", **choice: Any) -> JSON:
    return message_of(MessagesToChat().whole(completion(message, finish, **choice)))


def test_an_answer_is_a_message_with_its_usage() -> None:
    assert answered({"content": "hello"}) == {
        "id": "msg_7",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [text("hello")],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 4,
            "output_tokens": 4,
            "cache_read_input_tokens": 6,
            "cache_creation_input_tokens": 0,
            "output_tokens_details": {"thinking_tokens": 2},
        },
    }


@pytest.mark.parametrize(
    ("finish", "matched", "reason", "sequence"),
    [
        ("stop", None, "end_turn", None),
        ("stop", 128009, "end_turn", None),
        ("stop", "END", "stop_sequence", "END"),
        ("length", None, "max_tokens", None),
        ("tool_calls", None, "tool_use", None),
        ("content_filter", None, "refusal", None),
        (None, None, "end_turn", None),
        ("of tomorrow", None, "end_turn", None),
    ],
)
def test_every_finish_reason_is_a_stop_reason(finish: str | None, matched: object, reason: str, sequence: Any) -> None:
    message = answered({"content": "x"}, finish, stop_reason=matched)
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)


def test_a_call_of_a_named_tool_stops_for_the_tool_whatever_the_engine_says() -> None:
    assert answered({"content": None, "tool_calls": [tool_call()]}, "stop")["stop_reason"] == "tool_use"


def test_reasoning_comes_first_and_arguments_are_read() -> None:
    calls = [tool_call(arguments='{"a": 1.50}'), tool_call("sub", "c2", ""), {**tool_call("z"), "id": None}]
    message = answered({"reasoning_content": "hm", "content": "so", "tool_calls": calls}, "tool_calls")
    assert message["content"] == [
        {"type": "thinking", "thinking": "hm", "signature": "reasoning_content"},
        text("so"),
        tool_use(a=1.5),
        tool_use("sub", "c2"),
        tool_use("z", "toolu_7_2"),
    ]


@pytest.mark.parametrize("written", ['{"a": 1', "[1]", "no JSON", '"x"'])
def test_arguments_that_are_no_object_are_kept_as_text_and_find_their_way_back(written: str) -> None:
    message = answered({"content": None, "tool_calls": [tool_call(arguments=written)]}, "tool_calls")
    assert message["content"][0]["input"] == {"INVALID_JSON": written}
    back = chat_turns({"role": "assistant", "content": message["content"]})
    assert back[0]["tool_calls"][0]["function"]["arguments"] == written


def test_an_input_that_only_looks_like_kept_text_stays_an_object() -> None:
    turns = chat_turns({"role": "assistant", "content": [tool_use(INVALID_JSON=3), tool_use(INVALID_JSON="x", a=1)]})
    arguments = [json.loads(call["function"]["arguments"]) for call in turns[0]["tool_calls"]]
    assert arguments == [{"INVALID_JSON": 3}, {"INVALID_JSON": "x", "a": 1}]


def test_a_refusal_is_a_text_with_its_own_reason() -> None:
    message = answered({"content": None, "refusal": "I will not."})
    assert (message["content"], message["stop_reason"]) == ([text("I will not.")], "refusal")


@pytest.mark.parametrize("body", [b"{", b"[]", b"{}", b'{"choices": []}', b'{"choices": [{"message": 1}]}', b"\xff"])
def test_what_is_no_answer_is_the_backends_failure(body: bytes) -> None:
    with pytest.raises(BackendUnavailable):
        MessagesToChat().whole(body)


@pytest.mark.parametrize("finish", ["abort", "error"])
def test_an_answer_that_was_given_up_is_the_backends_failure(finish: str) -> None:
    with pytest.raises(BackendUnavailable):
        MessagesToChat().whole(completion({"content": "half"}, finish))


# There and back again.

words = st.text(st.characters(codec="utf-8"), max_size=8)
json_objects = st.dictionaries(words, st.integers() | words | st.lists(st.booleans(), max_size=2), max_size=3)


tool_names = st.sampled_from(["add", "look_up"])
user_blocks = st.one_of(
    words.filter(bool).map(text),
    st.just(IMAGE),
    st.just({"type": "image", "source": {"type": "url", "url": "https://x/y"}}),
)


@st.composite
def conversations(draw: st.DrawFn) -> list[JSON]:
    """Draws turns in the form that a round trip leaves as it is; see `docs/dialects.md`."""
    turns: list[JSON] = [user(*draw(st.lists(user_blocks, min_size=1, max_size=3)))]
    used = 0
    for _ in range(draw(st.integers(0, 3))):
        said = draw(words)
        calls = draw(st.lists(st.tuples(tool_names, json_objects), max_size=2))
        blocks = [text(said)] if said else []
        ids = [f"toolu_{used + number}" for number in range(len(calls))]
        blocks += [tool_use(name, tool_id) | {"input": i} for tool_id, (name, i) in zip(ids, calls, strict=True)]
        used += len(calls)
        if not blocks:
            continue
        turns.append({"role": "assistant", "content": blocks})
        results = [{"type": "tool_result", "tool_use_id": i, "content": draw(words.filter(bool))} for i in ids]
        asked = draw(st.lists(user_blocks, min_size=0 if results else 1, max_size=2))
        turns.append(user(*results, *asked))
    return turns


@settings(deadline=None)
@given(turns=conversations(), system=st.lists(words.filter(str.strip).map(text), max_size=2))
def test_a_conversation_comes_back_from_a_round_trip_as_it_was(turns: list[JSON], system: list[JSON]) -> None:
    tools = [{"name": name, "input_schema": {"type": "object"}} for name in ("add", "look_up")]
    request = {"model": "m", "max_tokens": 5, "messages": turns, "tools": tools, "stop_sequences": ["x"], "top_k": 2}
    if system:
        request["system"] = system
    chat = MessagesToChat().request(decode_fields(json.dumps(request).encode()))
    back = ChatToMessages().request(decode_fields(encode(chat)))
    assert json.loads(encode(back)) == request
