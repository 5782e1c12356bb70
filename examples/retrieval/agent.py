"""Answers a question from a library: it searches, reads, searches for what follows, and answers with a word.

An ordinary program on the vendor's SDK; run by hand, it answers one task from standard input:

echo '{"input": {"question": "in which country does ada live", "library": 1}}' | python agent.py
"""

import asyncio
import json
import sys

from library import TOOLS, search
from openai import AsyncOpenAI

MODEL = "reader"
MAX_SEARCHES = 5
MAX_ANSWER_TOKENS = 12

client = AsyncOpenAI()


def words_of(arguments: str) -> str:
    """Reads the tool's argument; empty if the model wrote something else."""
    try:
        return str(json.loads(arguments)["words"])
    except (ValueError, TypeError, KeyError):
        return ""


async def solve(task: dict) -> str:
    """Returns the answer; empty if the model never stops searching."""
    messages: list = [{"role": "user", "content": task["input"]["question"]}]
    for _ in range(MAX_SEARCHES + 1):
        completion = await client.chat.completions.create(
            model=MODEL, messages=messages, tools=TOOLS, max_tokens=MAX_ANSWER_TOKENS
        )
        answer = completion.choices[0].message
        if not answer.tool_calls:
            return answer.content or ""
        messages.append(answer.model_dump(exclude_none=True))
        messages += [
            {
                "role": "tool",
                "tool_call_id": call.id,
                "content": search(task["input"]["library"], words_of(call.function.arguments)),
            }
            for call in answer.tool_calls
        ]
    return ""


if __name__ == "__main__":
    print(asyncio.run(solve(json.load(sys.stdin))))
