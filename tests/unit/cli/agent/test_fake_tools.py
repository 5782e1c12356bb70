"""The built-in model of `fulmen agent check` uses tools as a model does, and its arguments are valid by their schema."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulmen_cli.agent.fake_tools import arguments_for, next_call
from fulmen_cli.agent.models import EchoModel

QUESTION = "Where is order 4711?"
# As pydantic, and with it most frameworks, write them.
PYDANTIC = {
    "$defs": {
        "Place": {"type": "object", "properties": {"city": {"type": "string"}, "zip": {"type": "string", "pattern": "^\\d{5}$"}}, "required": ["city"]},
        "Unit": {"enum": ["celsius", "fahrenheit"], "type": "string"},
    },
    "type": "object",
    "properties": {
        "place": {"$ref": "#/$defs/Place", "description": "where"},
        "unit": {"anyOf": [{"$ref": "#/$defs/Unit"}, {"type": "null"}]},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
    },
    "required": ["place", "unit", "days", "note"],
    "additionalProperties": False,
}  # fmt: skip


def of(**properties: Any) -> dict[str, Any]:
    """Returns the schema of a tool that requires these."""
    return {"type": "object", "properties": properties, "required": list(properties)}


@pytest.mark.parametrize(
    "schema",
    [
        {},
        of(order={"type": "integer"}),
        of(text={"type": "string", "minLength": 30}),
        of(text={"type": "string", "maxLength": 3}),
        of(
            code={"type": "string", "pattern": "^[A-Z]\\d$"},
            day={"type": "string", "pattern": "^\\d{4}-\\d\\d-\\d\\d$"},
        ),
        of(day={"type": "string", "format": "date"}, id={"type": "string", "format": "uuid"}),
        of(n={"type": "integer", "minimum": 5}, m={"type": "integer", "exclusiveMaximum": -3, "multipleOf": 4}),
        of(x={"type": "number", "exclusiveMinimum": 0, "maximum": 1}, y={"type": "number", "maximum": -2.5}),
        of(tags={"type": "array", "items": {"type": "string", "enum": ["a", "b"]}, "minItems": 2}),
        of(pair={"type": "array", "prefixItems": [{"type": "integer"}, {"type": "boolean"}], "minItems": 2}),
        of(kind={"const": "x"}, maybe={"type": ["null", "string"]}, free={}),
        of(either={"oneOf": [{"type": "integer"}, {"type": "string"}]}),
        of(both={"allOf": [of(a={"type": "integer"}), of(b={"type": "boolean"})]}),
        PYDANTIC,
    ],
    ids=lambda schema: json.dumps(schema)[:50],
)
def test_arguments_are_valid_by_the_schema_of_the_tool(schema: dict[str, Any]) -> None:
    made = arguments_for(schema, QUESTION)

    jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker()).validate(made)


@given(low=st.integers(-50, 50), size=st.integers(10, 60), step=st.integers(1, 9), text=st.text(max_size=20))
def test_integers_are_within_their_bounds_whatever_the_text_says(low: int, size: int, step: int, text: str) -> None:
    schema = of(n={"type": "integer", "minimum": low, "maximum": low + size, "multipleOf": step})

    jsonschema.validate(arguments_for(schema, text), schema)


def test_a_number_of_the_question_is_taken_where_it_fits() -> None:
    assert arguments_for(of(order={"type": "integer"}), QUESTION) == {"order": 4711}
    assert arguments_for(of(order={"type": "integer", "maximum": 99}), QUESTION) == {"order": 0}


def test_a_schema_that_contains_itself_ends() -> None:
    node = {"$ref": "#/$defs/Node"}
    schema = {"$defs": {"Node": of(next=node)}, **of(first=node)}

    assert arguments_for(schema, "x").keys() == {"first"}


def answered(path: str, request: dict[str, Any]) -> Any:
    """Returns the model's answer: a document, or the data of its events."""
    answer = EchoModel().answer("POST", path, {}, json.dumps(request).encode())
    assert answer.status == 200
    text = b"".join(answer.pieces).decode()
    if not request.get("stream"):
        return json.loads(text)
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


FUNCTIONS = [
    {"type": "function", "function": {"name": "find", "parameters": of(order={"type": "integer"})}},
    {"type": "function", "function": {"name": "now"}},
]


def test_each_tool_is_called_once_in_order_and_then_the_last_result_is_repeated() -> None:
    turns: list[dict[str, Any]] = [{"role": "user", "content": QUESTION}]
    calls = []
    for result in ("shipped", "noon"):
        choice = answered("/v1/chat/completions", {"messages": turns, "tools": FUNCTIONS})["choices"][0]
        [call] = choice["message"]["tool_calls"]
        calls.append((choice["finish_reason"], call["function"]))
        turns += [choice["message"], {"role": "tool", "tool_call_id": call["id"], "content": result}]
    ended = answered("/v1/chat/completions", {"messages": turns, "tools": FUNCTIONS})["choices"][0]

    assert calls == [
        ("tool_calls", {"name": "find", "arguments": '{"order": 4711}'}),
        ("tool_calls", {"name": "now", "arguments": "{}"}),
    ]
    assert ended == {"index": 0, "message": {"role": "assistant", "content": "noon"}, "finish_reason": "stop"}
    # A new question begins anew.
    again = answered("/v1/chat/completions", {"messages": [*turns, turns[0]], "tools": FUNCTIONS})
    assert again["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "find"


@pytest.mark.parametrize(
    ("choice", "name"),
    [
        ("none", None),
        ("auto", "find"),
        ("required", "find"),
        ({"type": "function", "function": {"name": "now"}}, "now"),
    ],
)
def test_a_request_may_forbid_or_demand_a_tool(choice: object, name: str | None) -> None:
    call = next_call({"messages": [], "tools": FUNCTIONS, "tool_choice": choice}, "")

    assert (call.name if call else None) == name


def test_a_streamed_call_has_the_parts_of_a_plain_one() -> None:
    request = {"messages": [{"role": "user", "content": QUESTION}], "tools": FUNCTIONS}
    whole = answered("/v1/chat/completions", request)["choices"][0]
    events = answered("/v1/chat/completions", request | {"stream": True})

    deltas = [event["choices"][0]["delta"] for event in events if event["choices"]]
    [streamed] = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert streamed.pop("index") == 0
    assert [streamed] == whole["message"]["tool_calls"]
    assert [each["choices"][0]["finish_reason"] for each in events if each["choices"]][-1] == "tool_calls"


def test_messages_call_tools_too_plain_and_streamed() -> None:
    tools = [{"name": "find", "input_schema": of(order={"type": "integer"})}]
    request: dict[str, Any] = {"messages": [{"role": "user", "content": QUESTION}], "tools": tools}
    answer = answered("/v1/messages", request)
    streamed = answered("/v1/messages", request | {"stream": True})

    use = {"type": "tool_use", "id": "call_0", "name": "find", "input": {"order": 4711}}
    assert (answer["content"], answer["stop_reason"]) == ([use], "tool_use")
    [delta] = [each["delta"] for each in streamed if each["type"] == "content_block_delta"]
    assert json.loads(delta["partial_json"]) == use["input"]
    result = {"type": "tool_result", "tool_use_id": "call_0", "content": [{"type": "text", "text": "shipped"}]}
    request["messages"] += [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    ended = answered("/v1/messages", request)
    assert (ended["content"], ended["stop_reason"]) == ([{"type": "text", "text": "shipped"}], "end_turn")


def test_responses_call_tools_too() -> None:
    tools = [{"type": "function", "name": "find", "parameters": of(order={"type": "integer"})}, {"type": "web_search"}]
    request: dict[str, Any] = {"input": [{"role": "user", "content": QUESTION}], "tools": tools}
    [call] = answered("/v1/responses", request)["output"]

    assert (call["type"], call["name"], json.loads(call["arguments"])) == ("function_call", "find", {"order": 4711})
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "shipped"}
    [message] = answered("/v1/responses", request | {"input": [*request["input"], call, result]})["output"]
    assert message["content"][0]["text"] == "shipped"
