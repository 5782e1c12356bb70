"""Answers a customer's question about an order: an agent on OpenAI's Agents SDK.

Needs `pip install openai-agents` where the runners are.
By hand: echo '{"input": {"question": "Where is order 12?"}}' | python agent.py
"""

import asyncio
import json
import sys
from pathlib import Path

from agents import Agent, Runner, function_tool

FOLDER = Path(__file__).parent
ORDERS = json.loads((FOLDER / "orders.json").read_text())
# The SDK reads OPENAI_BASE_URL and OPENAI_API_KEY, which Fulmen sets.
MODEL = "assistant"


def prompt() -> str:
    """Returns the system prompt."""
    return (FOLDER / "prompt.md").read_text().strip()


@function_tool
def find_order(order: int) -> str:
    """Returns the state of an order."""
    return ORDERS.get(str(order), "unknown")


async def solve(task: dict) -> str:
    """Returns the model's answer to the task's question, as text."""
    agent = Agent(name="Support", instructions=prompt(), model=MODEL, tools=[find_order])
    result = await Runner.run(agent, task["input"]["question"])
    return str(result.final_output)


if __name__ == "__main__":
    print(asyncio.run(solve(json.load(sys.stdin))))
