"""Writes a function for a sentence: it tries an expression on public tests, sees the results, and may try again.

An ordinary program on the vendor's SDK; run by hand, it answers one task from standard input:

echo '{"input": {"function": "the sum of the squares of the positive even numbers", "tests": [[[1, 2], 4]]}}' | python agent.py
"""

import asyncio
import json
import sys

from openai import AsyncOpenAI
from trial import PASSED, TOOLS, run

MODEL = "coder"
MAX_TRIALS = 3
MAX_ANSWER_TOKENS = 48

client = AsyncOpenAI()


def code_of(arguments: str) -> str:
    """Reads the tool's argument; empty if the model wrote something else."""
    try:
        return str(json.loads(arguments)["code"])
    except (ValueError, TypeError, KeyError):
        return ""


async def solve(task: dict) -> str:
    """Returns the last expression that the model tried; empty if it tried none."""
    messages: list = [{"role": "user", "content": task["input"]["function"]}]
    code = ""
    for _ in range(MAX_TRIALS):
        completion = await client.chat.completions.create(
            model=MODEL, messages=messages, tools=TOOLS, max_tokens=MAX_ANSWER_TOKENS
        )
        answer = completion.choices[0].message
        if not answer.tool_calls:
            break
        messages.append(answer.model_dump(exclude_none=True))
        for call in answer.tool_calls:
            code = code_of(call.function.arguments)
            # In a thread, so that other agents of this process continue while the tests run.
            result = await asyncio.to_thread(run, code, task["input"]["tests"])
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        if result == PASSED:
            break
    return code


if __name__ == "__main__":
    print(asyncio.run(solve(json.load(sys.stdin))))
