"""A crew on CrewAI: its only agent answers with the help of a calculator.

By hand: echo '{"question": "What is 6 times 7, and what is 8 times 9?"}' | python crewai_agent.py
"""

import json
import os
import sys

from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool


@tool
def calculator(a: int, b: int) -> int:
    """Multiplies two numbers below 100."""
    if max(a, b) >= 100:
        raise ValueError("the calculator takes numbers below 100")
    return a * b


def solve(task):
    llm = LLM(os.environ.get("AGENT_MODEL", "gpt-4.1-mini"), provider="openai")
    worker = Agent(role="Calculator", goal="Calculate", backstory="You calculate.", llm=llm, tools=[calculator])
    work = Task(description=task["question"], expected_output="The products.", agent=worker)
    return Crew(agents=[worker], tasks=[work]).kickoff().raw


if __name__ == "__main__":
    print(solve(json.load(sys.stdin)))
