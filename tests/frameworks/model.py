"""What the model of these tests says: it multiplies, with the calculator if it is offered one, else in its head.

It is deterministic, and it does what frameworks ask of a model: calls a tool, several times at once, tells the results,
answers by a schema. What it tells of its calls it reads from the conversation, so that whoever mixes up a call's
arguments, id or result gets another answer.
"""

from __future__ import annotations

import json
import re
from typing import Any

from tests.support.backend import call_of

JSON = dict[str, Any]
_PRODUCT = re.compile(r"(\d+) times (\d+)")


def multiply(body: JSON) -> str | list[JSON]:
    """Returns what the model says to a request, or its calls of a tool."""
    messages = body["messages"]
    if messages[-1]["role"] == "tool":
        return told(calculated(messages))
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


def calculated(messages: list[JSON]) -> list[tuple[int, int, int]]:
    """Returns the factors of each call of the calculator, and the result that bears its id."""
    results = {message["tool_call_id"]: int(text_of(message)) for message in messages if message["role"] == "tool"}
    calls = [call for message in messages for call in message.get("tool_calls") or ()]
    factors = [(json.loads(call["function"]["arguments"]), results[call["id"]]) for call in calls]
    return [(given["a"], given["b"], result) for given, result in factors]


def told(products: list[tuple[int, int, int]]) -> str:
    """Returns products as sentences."""
    return " ".join(f"{a} times {b} is {product}." for a, b, product in products)


def text_of(message: JSON) -> str:
    """Returns the text of a message, whose content may be parts."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
