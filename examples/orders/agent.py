"""Extracts an order from a message: an ordinary program on the vendor's SDK. Run by hand, it reads one message:

echo '{"input": {"message": "anna here please send two lamps to oslo"}}' | python agent.py
"""

import asyncio
import json
import sys

from openai import AsyncOpenAI

MODEL = "orders"
MAX_ANSWER_TOKENS = 16

client = AsyncOpenAI()


async def solve(task: dict) -> str:
    """Returns the order as the model wrote it: `name: anna count: two item: lamps city: oslo`."""
    completion = await client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": task["input"]["message"]}],
        max_tokens=MAX_ANSWER_TOKENS,
    )
    return completion.choices[0].message.content or ""


if __name__ == "__main__":
    print(asyncio.run(solve(json.load(sys.stdin))))
