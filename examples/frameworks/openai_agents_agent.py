"""An agent on OpenAI's Agents SDK: it answers with the help of a calculator.

By hand: echo '{"question": "What is 6 times 7, and what is 8 times 9?"}' | python openai_agents_agent.py
"""

import asyncio
import json
import os
import sys

from agents import Agent, Runner, function_tool


@function_tool
def calculator(a: int, b: int) -> int:
    """Multiplies two numbers below 100."""
    if max(a, b) >= 100:
        raise ValueError("the calculator takes numbers below 100")
    return a * b


model = os.environ.get("AGENT_MODEL", "gpt-4.1-mini")
agent = Agent(name="Calculator", instructions="You calculate.", model=model, tools=[calculator])


async def solve(task):
    result = await Runner.run(agent, task["question"])
    return result.final_output


if __name__ == "__main__":
    print(asyncio.run(solve(json.load(sys.stdin))))
