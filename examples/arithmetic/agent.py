"""Asks a model for a sum: an ordinary program on the vendor's SDK. Run by hand, it answers one task:

echo '{"input": {"question": "12+34="}}' | python agent.py
"""

import asyncio
import json
import sys

from openai import AsyncOpenAI

MODEL = "arithmetic"
MAX_ANSWER_TOKENS = 16

client = AsyncOpenAI()


async def solve(task: dict) -> str:
    """Returns the model's answer to the task's question, as text."""
    completion = await client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": task["input"]["question"]}],
        max_tokens=MAX_ANSWER_TOKENS,
    )
    return completion.choices[0].message.content or ""


if __name__ == "__main__":
    print(asyncio.run(solve(json.load(sys.stdin))))
