"""Answers a customer's question about an order: an ordinary program on the `openai` package.

By hand: echo '{"input": {"question": "Where is order 12?"}}' | python agent.py
"""

import asyncio
import json
import sys
from pathlib import Path

from openai import AsyncOpenAI

FOLDER = Path(__file__).parent
ORDERS = json.loads((FOLDER / "orders.json").read_text())
MODEL = "assistant"
MAX_TURNS = 4
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "find_order",
            "description": "Returns the state of an order.",
            "parameters": {"type": "object", "properties": {"order": {"type": "integer"}}, "required": ["order"]},
        },
    }
]

# Reads OPENAI_BASE_URL and OPENAI_API_KEY, which Fulmen sets.
client = AsyncOpenAI()


def prompt() -> str:
    """Returns the system prompt."""
    return (FOLDER / "prompt.md").read_text().strip()


def find_order(arguments: str) -> str:
    """Returns the state of an order; the model may have written any arguments."""
    try:
        return ORDERS.get(str(json.loads(arguments)["order"]), "unknown")
    except (ValueError, TypeError, KeyError):
        return "unknown"


async def solve(task: dict) -> str:
    """Returns the model's answer to the task's question, as text."""
    messages: list = [
        {"role": "system", "content": prompt()},
        {"role": "user", "content": task["input"]["question"]},
    ]
    for _ in range(MAX_TURNS):
        completion = await client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS)
        answer = completion.choices[0].message
        if not answer.tool_calls:
            return answer.content or ""
        messages.append(answer.model_dump(exclude_none=True))
        messages += [
            {"role": "tool", "tool_call_id": call.id, "content": find_order(call.function.arguments)}
            for call in answer.tool_calls
        ]
    return ""


if __name__ == "__main__":
    print(asyncio.run(solve(json.load(sys.stdin))))
