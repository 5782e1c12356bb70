"""What the model of these tests says: it multiplies, by the calculator if it is offered one, else in its head.

It is deterministic, and it does what frameworks ask of a model: calls a tool, tells its result, answers by a schema.
"""

from __future__ import annotations

import json
import re
from typing import Any

from tests.support.backend import call_of

JSON = dict[str, Any]
_PRODUCT = re.compile(r"(\d+) times (\d+)")


def multiply(body: JSON) -> tuple[str, JSON | None]:
    """Returns what the model says to a request, and the tool that it calls, whose arguments it then says."""
    messages = body["messages"]
    asked = [text_of(message) for message in messages if message["role"] == "user"]
    a, b = (int(number) for number in _PRODUCT.findall("\n".join(asked))[-1])
    known = {"a": a, "b": b, "product": a * b}
    if messages[-1]["role"] == "tool":
        known["product"] = int(text_of(messages[-1]))
    elif body.get("tools"):
        function = body["tools"][0]["function"]
        arguments = filled(function["parameters"], known)
        return arguments, call_of(function["name"], arguments)
    asked_for = body.get("response_format") or {}
    if asked_for.get("type") == "json_schema":
        return filled(asked_for["json_schema"]["schema"], known), None
    return f"{a} times {b} is {known['product']}.", None


def filled(schema: JSON, known: JSON) -> str:
    """Returns the fields of a schema, with the values that are known."""
    return json.dumps({name: known[name] for name in schema["properties"]})


def text_of(message: JSON) -> str:
    """Returns the text of a message, whose content may be parts."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
