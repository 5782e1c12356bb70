"""Computes chains of operations with a pocket calculator: one model call per operation, and one to answer.

An ordinary program on the vendor's SDK; run by hand, it answers one task from standard input:

echo '{"input": {"question": "19+34-25+60-11"}}' | python agent.py
"""

import asyncio
import json
import re
import sys

from openai import AsyncOpenAI

MODEL = "calculator"
MAX_TURNS = 10
MAX_ANSWER_TOKENS = 12

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Adds or subtracts two numbers of two digits.",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string"}},
                "required": ["expression"],
            },
        },
    }
]

OPERATION = re.compile(r"(\d\d)([+-])(\d\d)")
LARGEST = 99

client = AsyncOpenAI()


def calculate(expression: str) -> str:
    """Computes one addition or subtraction of two-digit numbers; `error` if the result exceeds the display."""
    found = OPERATION.fullmatch(expression)
    if found is None:
        return "error"
    first, sign, second = found.groups()
    value = int(first) + int(second) if sign == "+" else int(first) - int(second)
    return f"{value:02d}" if 0 <= value <= LARGEST else "error"


def use_tool(arguments: str) -> str:
    """Runs one call of the calculator; invalid arguments are reported to the model, not raised."""
    try:
        return calculate(str(json.loads(arguments)["expression"]))
    except (ValueError, TypeError, KeyError):
        return "error"


async def solve(task: dict) -> str:
    """Returns the model's answer to the task's question, as text; empty if it never stops calling the tool."""
    messages: list = [{"role": "user", "content": task["input"]["question"]}]
    for _ in range(MAX_TURNS):
        completion = await client.chat.completions.create(
            model=MODEL, messages=messages, tools=TOOLS, max_tokens=MAX_ANSWER_TOKENS
        )
        answer = completion.choices[0].message
        if not answer.tool_calls:
            return answer.content or ""
        messages.append(answer.model_dump(exclude_none=True))
        messages += [
            {"role": "tool", "tool_call_id": call.id, "content": use_tool(call.function.arguments)}
            for call in answer.tool_calls
        ]
    return ""


if __name__ == "__main__":
    print(asyncio.run(solve(json.load(sys.stdin))))
