"""An agent on LangChain and LangGraph: it answers with the help of a calculator.

By hand: echo '{"question": "What is 6 times 7, and what is 8 times 9?"}' | python langchain_agent.py
"""

import asyncio
import json
import os
import sys

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI


def calculator(a: int, b: int) -> int:
    """Multiplies two numbers below 100."""
    if max(a, b) >= 100:
        raise ValueError("the calculator takes numbers below 100")
    return a * b


model = ChatOpenAI(model=os.environ.get("AGENT_MODEL", "gpt-4.1-mini"))
agent = create_agent(model, tools=[calculator], system_prompt="You calculate.")


async def solve(task):
    state = await agent.ainvoke({"messages": [("user", task["question"])]})
    return state["messages"][-1].text


def solve_blocking(task):
    state = agent.invoke({"messages": [("user", task["question"])]})
    return state["messages"][-1].text


if __name__ == "__main__":
    print(asyncio.run(solve(json.load(sys.stdin))))
