"""An agent on smolagents: it answers with the help of a calculator.

By hand: echo '{"question": "What is 6 times 7, and what is 8 times 9?"}' | python smolagents_agent.py
"""

import json
import os
import sys

from smolagents import LogLevel, OpenAIServerModel, ToolCallingAgent, tool


@tool
def calculator(a: int, b: int) -> int:
    """Multiplies two numbers below 100.

    Args:
        a: One number.
        b: The other number.
    """
    if max(a, b) >= 100:
        raise ValueError("the calculator takes numbers below 100")
    return a * b


def solve(task):
    model = OpenAIServerModel(model_id=os.environ.get("AGENT_MODEL", "gpt-4.1-mini"))
    agent = ToolCallingAgent(tools=[calculator], model=model, max_steps=4, verbosity_level=LogLevel.OFF)
    return agent.run(task["question"])


if __name__ == "__main__":
    print(solve(json.load(sys.stdin)))
