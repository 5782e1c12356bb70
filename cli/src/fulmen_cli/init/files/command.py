"""Answers a customer's question about an order: a program that needs no package. Any other language works the same way.

It reads the task from standard input and the model's address from its environment, and prints its answer.
"""

import json
import os
import sys
from pathlib import Path
from urllib.request import Request, urlopen

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


def prompt() -> str:
    """Returns the system prompt."""
    return (FOLDER / "prompt.md").read_text().strip()


def find_order(arguments: str) -> str:
    """Returns the state of an order; the model may have written any arguments."""
    try:
        return ORDERS.get(str(json.loads(arguments)["order"]), "unknown")
    except (ValueError, TypeError, KeyError):
        return "unknown"


def ask(messages: list) -> dict:
    """Returns the model's next message."""
    request = Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": MODEL, "messages": messages, "tools": TOOLS}).encode(),
        {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
    )
    with urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]


def solve(task: dict) -> str:
    """Returns the model's answer to the task's question, as text."""
    messages = [
        {"role": "system", "content": prompt()},
        {"role": "user", "content": task["input"]["question"]},
    ]
    for _ in range(MAX_TURNS):
        answer = ask(messages)
        calls = answer.get("tool_calls")
        if not calls:
            return answer.get("content") or ""
        messages.append({"role": "assistant", "content": answer.get("content") or "", "tool_calls": calls})
        messages += [
            {"role": "tool", "tool_call_id": call["id"], "content": find_order(call["function"]["arguments"])}
            for call in calls
        ]
    return ""


if __name__ == "__main__":
    print(solve(json.load(sys.stdin)))
