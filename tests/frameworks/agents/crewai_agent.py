"""A crew on CrewAI. Usage: crewai_agent.py openai|anthropic [SCENARIO...]."""

import json
import os
import sys

from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool
from pydantic import BaseModel

MODEL = os.environ["AGENT_MODEL"]
QUESTION = "What is 6 times 7, and what is 8 times 9?"
calls = []


class Product(BaseModel):
    """A product and its factors."""

    a: int
    b: int
    product: int


@tool
def calculator(a: int, b: int) -> int:
    """Multiplies two numbers."""
    calls.append([a, b])
    return a * b


def crew_of(model, *, tools=(), **options):
    worker = Agent(role="Calculator", goal="Calculate", backstory="You calculate.", llm=model, tools=list(tools))
    task = Task(description=QUESTION, expected_output="The product.", agent=worker, **options)
    return Crew(agents=[worker], tasks=[task])


def agent(provider):
    return crew_of(LLM(MODEL, provider=provider), tools=[calculator]).kickoff().raw


def agent_stream(provider):
    return crew_of(LLM(MODEL, provider=provider, stream=True), tools=[calculator]).kickoff().raw


def structured(provider):
    return crew_of(LLM(MODEL, provider=provider), output_pydantic=Product).kickoff().pydantic.model_dump()


SCENARIOS = {run.__name__: run for run in (agent, agent_stream, structured)}

if __name__ == "__main__":
    results = {name: SCENARIOS[name](sys.argv[1]) for name in sys.argv[2:] or SCENARIOS}
    print(json.dumps({**results, "calls": calls}))
