"""Tools of the Responses API that chat completions lack: their calls are the caller's own again, whole and in streams."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulmen.errors import ArgumentInvalid
from tests.unit.llm_proxy.translation.test_responses_to_chat import (
    FUNCTION,
    chat_of,
    message_answer,
    messages_of,
    stream_of,
    translated,
    whole_of,
)

JSON = dict[str, Any]
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}
PATCH = {"type": "custom", "name": "patch", "description": "Applies a patch.", "format": GRAMMAR}
AGENTS = {
    "type": "namespace",
    "name": "agents",
    "description": "Other agents.",
    "tools": [FUNCTION, {"type": "custom", "name": "tell", "description": "Tells them.", "format": {"type": "text"}}],
}
TOOLS = [FUNCTION, PATCH, AGENTS]
INPUT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


def called(number: int, name: str, arguments: str) -> JSON:
    return {"id": f"c{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


def test_the_model_is_offered_a_function_for_each_of_them() -> None:
    functions = [tool["function"] for tool in chat_of(input="x", tools=TOOLS)["tools"]]
    own = {"parameters": {"type": "object"}, "strict": True}
    grammar = "Applies a patch.\n\n`input` follows this grammar (lark):\nstart: /.+/"
    assert functions == [
        {"name": "look", "description": "d", **own},
        {"name": "patch", "description": grammar, "parameters": INPUT},
        {"name": "agents__look", "description": "Other agents.\n\nd", **own},
        {"name": "agents__tell", "description": "Other agents.\n\nTells them.", "parameters": INPUT},
    ]


def test_a_custom_tool_can_be_chosen() -> None:
    chosen = {"type": "function", "function": {"name": "patch"}}
    assert chat_of(input="x", tools=TOOLS, tool_choice={"type": "custom", "name": "patch"})["tool_choice"] == chosen


def test_their_calls_and_results_are_those_of_functions_in_a_conversation() -> None:
    assert messages_of(
        {"type": "custom_tool_call", "id": "ctc", "call_id": "c1", "name": "patch", "input": 'é "a"\n'},
        {"type": "function_call", "call_id": "c2", "name": "look", "namespace": "agents", "arguments": '{"a":1}'},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "seen"}]},
    ) == [
        {
            "role": "assistant",
            "tool_calls": [called(1, "patch", '{"input": "é \\"a\\"\\n"}'), called(2, "agents__look", '{"a":1}')],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "done"},
        {"role": "tool", "tool_call_id": "c2", "content": "seen"},
    ]


def test_the_models_calls_are_the_callers_own_again() -> None:
    calls = [
        called(1, "look", "{}"),
        called(2, "patch", '{"input":"*** Begin"}'),
        called(3, "agents__look", '{"a": 1}'),
        called(4, "agents__tell", '{"input": "hi"}'),
    ]
    output = whole_of(message_answer({"content": None, "tool_calls": calls}), tools=TOOLS)["output"]
    kept = [{key: value for key, value in item.items() if key not in ("id", "status")} for item in output]
    assert kept == [
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
        {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": "*** Begin"},
        {"type": "function_call", "call_id": "c3", "name": "look", "namespace": "agents", "arguments": '{"a": 1}'},
        {"type": "custom_tool_call", "call_id": "c4", "name": "tell", "namespace": "agents", "input": "hi"},
    ]


@pytest.mark.parametrize("arguments", ["*** Begin", '{"input": 1}', '{"input": "a", "other": 2}', '{"input": "cut', ""])
def test_what_a_model_wrote_instead_of_a_custom_tools_input_reaches_the_tool_as_it_is(arguments: str) -> None:
    answer = message_answer({"content": None, "tool_calls": [called(1, "patch", arguments)]})
    assert whole_of(answer, tools=TOOLS)["output"][0]["input"] == arguments


@given(given_input=st.text(max_size=20), pieces=st.integers(1, 5))
def test_a_stream_gives_the_input_of_a_custom_tool_that_the_whole_answer_has(given_input: str, pieces: int) -> None:
    calls = [called(1, "patch", json.dumps({"input": given_input})), called(2, "agents__look", '{"a": 1}')]
    answer = message_answer({"content": None, "tool_calls": calls}, finish="tool_calls")

    events = translated(stream_of(answer, pieces), [], tools=TOOLS)

    whole = whole_of(answer, tools=TOOLS, stream=True)
    assert events[-1]["response"] == whole
    told = [event for event in events if "custom_tool_call_input" in event["type"]]
    assert [event.get("delta", event.get("input")) for event in told] == [given_input] * 2
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == whole["output"]


CLASH = {"type": "function", "name": "agents__look"}


@pytest.mark.parametrize("tools", [[CLASH, AGENTS], [AGENTS, CLASH]])
def test_two_tools_that_would_be_one_function_are_refused(tools: list[JSON]) -> None:
    with pytest.raises(ArgumentInvalid, match="two tools that are the function 'agents__look'"):
        chat_of(input="x", tools=tools)


def test_what_codex_says_of_itself_is_not_sent_to_an_engine() -> None:
    assert "client_metadata" not in chat_of(input="x", client_metadata={"session_id": "1"})
