"""Answers a question about a shop with one SQL statement: it tries a statement, sees the result, and may try again.

An ordinary program on the vendor's SDK; run by hand, it answers one task from standard input:

echo '{"input": {"question": "how many orders are there in march", "database": 1}}' | python agent.py
"""

import asyncio
import json
import sys

from openai import AsyncOpenAI
from shop import TOOLS, run

MODEL = "analyst"
MAX_STATEMENTS = 3
MAX_ANSWER_TOKENS = 48

client = AsyncOpenAI()


def statement(arguments: str) -> str:
    """Reads the tool's argument; empty if the model wrote something else."""
    try:
        return str(json.loads(arguments)["sql"])
    except (ValueError, TypeError, KeyError):
        return ""


async def solve(task: dict) -> str:
    """Returns the last statement that the model tried; empty if it tried none."""
    messages: list = [{"role": "user", "content": task["input"]["question"]}]
    sql = ""
    for _ in range(MAX_STATEMENTS):
        completion = await client.chat.completions.create(
            model=MODEL, messages=messages, tools=TOOLS, max_tokens=MAX_ANSWER_TOKENS
        )
        answer = completion.choices[0].message
        if not answer.tool_calls:
            break
        messages.append(answer.model_dump(exclude_none=True))
        for call in answer.tool_calls:
            sql = statement(call.function.arguments)
            result = str(run(sql, task["input"]["database"]))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return sql


if __name__ == "__main__":
    print(asyncio.run(solve(json.load(sys.stdin))))
