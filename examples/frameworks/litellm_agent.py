"""An agent on LiteLLM: it answers with the help of a calculator.

By hand: echo '{"question": "What is 6 times 7, and what is 8 times 9?"}' | python litellm_agent.py
"""

import asyncio
import json
import os
import sys

import litellm

MODEL = "openai/" + os.environ.get("AGENT_MODEL", "gpt-4.1-mini")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Multiplies two numbers below 100.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "required": ["a", "b"],
            },
        },
    }
]


def calculator(a: int, b: int) -> int:
    if max(a, b) >= 100:
        raise ValueError("the calculator takes numbers below 100")
    return a * b


async def solve(task):
    messages = [{"role": "user", "content": task["question"]}]
    while True:
        completion = await litellm.acompletion(MODEL, messages, tools=TOOLS)
        message = completion.choices[0].message
        if not message.tool_calls:
            return message.content
        messages.append(message)
        for call in message.tool_calls:
            product = calculator(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(product)})


if __name__ == "__main__":
    print(asyncio.run(solve(json.load(sys.stdin))))
