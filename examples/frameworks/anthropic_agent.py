"""An agent on Anthropic's Python SDK: it answers with the help of a calculator, and reports tool errors to the model.

By hand: echo '{"question": "What is 6 times 7, and what is 8 times 9?"}' | python anthropic_agent.py
"""

import json
import os
import sys

from anthropic import Anthropic

MODEL = os.environ.get("AGENT_MODEL", "claude-sonnet-4-5")
TOOLS = [
    {
        "name": "calculator",
        "description": "Multiplies two numbers below 100.",
        "input_schema": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    }
]

client = Anthropic()


def calculator(a: int, b: int) -> int:
    if max(a, b) >= 100:
        raise ValueError("the calculator takes numbers below 100")
    return a * b


def result_of(call):
    try:
        return {"type": "tool_result", "tool_use_id": call.id, "content": str(calculator(**call.input))}
    except ValueError as error:
        return {"type": "tool_result", "tool_use_id": call.id, "content": str(error), "is_error": True}


def solve(task):
    messages = [{"role": "user", "content": task["question"]}]
    while True:
        message = client.messages.create(model=MODEL, max_tokens=500, messages=messages, tools=TOOLS)
        calls = [block for block in message.content if block.type == "tool_use"]
        if not calls:
            return "".join(block.text for block in message.content if block.type == "text")
        messages.append({"role": "assistant", "content": message.content})
        messages.append({"role": "user", "content": [result_of(call) for call in calls]})


if __name__ == "__main__":
    print(solve(json.load(sys.stdin)))
