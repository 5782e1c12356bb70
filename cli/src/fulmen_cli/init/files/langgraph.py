"""Answers a customer's question about an order: an agent on LangChain and LangGraph.

Needs `pip install langchain langchain-openai` where the runners are.
By hand: echo '{"input": {"question": "Where is order 12?"}}' | python agent.py
"""

import asyncio
import json
import sys
from pathlib import Path

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI

FOLDER = Path(__file__).parent
ORDERS = json.loads((FOLDER / "orders.json").read_text())

# Reads OPENAI_BASE_URL and OPENAI_API_KEY, which Fulmen sets, when it is made: in each attempt.
MODEL = "assistant"


def prompt() -> str:
    """Returns the system prompt."""
    return (FOLDER / "prompt.md").read_text().strip()


def find_order(order: int) -> str:
    """Returns the state of an order."""
    return ORDERS.get(str(order), "unknown")


async def solve(task: dict) -> str:
    """Returns the model's answer to the task's question, as text."""
    agent = create_agent(ChatOpenAI(model=MODEL), tools=[find_order], system_prompt=prompt())
    state = await agent.ainvoke({"messages": [("user", task["input"]["question"])]})
    return state["messages"][-1].text


if __name__ == "__main__":
    print(asyncio.run(solve(json.load(sys.stdin))))
