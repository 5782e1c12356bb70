"""What the model of these tests says: it multiplies, with the calculator if it is offered one, else in its head.

It is deterministic, and it does what frameworks ask of a model: calls a tool, several times at once, tells the results,
answers by a schema. What it tells of its calls it reads from the conversation, so that whoever mixes up a call's
arguments, id or result gets another answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from tests.support.llm_proxy.backend import call_of

JSON = dict[str, Any]
_PRODUCT = re.compile(r"(\d+) times (\d+)")
FINAL_TOOL = "final_answer"
"""By which smolagents has the model end; it tells results as texts of the user, not by the ids of calls."""

_OBSERVED = re.compile(r"^(?:\d+|.*Error.*)$", re.MULTILINE)


def multiply(body: JSON) -> str | list[JSON]:
    """Returns what the model says to a request, or its calls of a tool."""
    messages = body["messages"]
    if messages[-1]["role"] == "tool":
        return told(calculated(messages))
    tools = [tool["function"]["name"] for tool in body.get("tools") or ()]
    if FINAL_TOOL in tools and _OBSERVED.search(text_of(messages[-1])):
        return [call_of(FINAL_TOOL, {"answer": " ".join(_OBSERVED.findall(text_of(messages[-1])))}, 3)]
    asked = "\n".join(text_of(message) for message in messages if message["role"] == "user")
    # Some frameworks repeat the question.
    products = [(int(a), int(b), int(a) * int(b)) for a, b in dict.fromkeys(_PRODUCT.findall(asked))]
    known = [{"a": a, "b": b, "product": product} for a, b, product in products]
    if body.get("tools"):
        function = body["tools"][0]["function"]
        calls = [call_of(function["name"], by(function["parameters"], one), n) for n, one in enumerate(known, 1)]
        return calls if "product" not in function["parameters"]["properties"] else calls[:1]
    asked_for = body.get("response_format") or {}
    if asked_for.get("type") == "json_schema":
        return json.dumps(by(asked_for["json_schema"]["schema"], known[0]))
    return told(products)


def by(schema: JSON, known: JSON) -> JSON:
    """Returns the fields of a schema, with the values that are known."""
    return {name: known[name] for name in schema["properties"]}


def calculated(messages: list[JSON]) -> list[tuple[int, int, int | None]]:
    """Returns the factors of each call of the calculator, and the result that bears its id; None if it is none."""
    texts = {message["tool_call_id"]: text_of(message) for message in messages if message["role"] == "tool"}
    results = {call_id: int(text) if text.isdecimal() else None for call_id, text in texts.items()}
    calls = [call for message in messages for call in message.get("tool_calls") or ()]
    factors = [(json.loads(call["function"]["arguments"]), results[call["id"]]) for call in calls]
    return [(given["a"], given["b"], result) for given, result in factors]


def told(products: Sequence[tuple[int, int, int | None]]) -> str:
    """Returns products as sentences; one that the calculator failed at is said to be unknown."""
    return " ".join(f"{a} times {b} is {'unknown' if product is None else product}." for a, b, product in products)


def text_of(message: JSON) -> str:
    """Returns the text of a message, whose content may be parts."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
