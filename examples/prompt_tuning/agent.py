"""Classifies messages of customers with a prompt that a search may change. Run by hand, it answers one task:

echo '{"input": {"message": "Where is my parcel?"}}' | python agent.py
"""

import asyncio
import json
import sys
from pathlib import Path

from openai import AsyncOpenAI

import fulmen

MODEL = "worker"
FIRST_PROMPT = (Path(__file__).parent / "prompt.md").read_text()

client = AsyncOpenAI()


async def solve(task: dict) -> str:
    """Returns the model's word for the kind of a message."""
    # In a search, the rollout has the candidate; otherwise the agent uses its own prompt.
    prompt = fulmen.prompt(FIRST_PROMPT).replace("{message}", task["input"]["message"])
    completion = await client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": prompt}])
    return completion.choices[0].message.content or ""


def grade(task: dict, outcome: str) -> float:
    """Returns 1.0 for exactly the right word, 0.3 if the answer contains it, 0.0 otherwise."""
    wanted = task["kind"]
    if outcome.strip() == wanted:
        return 1.0
    return 0.3 if wanted in outcome.lower() else 0.0


if __name__ == "__main__":
    print(asyncio.run(solve(json.load(sys.stdin))))
