"""An agent on LangChain and LangGraph. Usage: langchain_agent.py openai|anthropic [SCENARIO...]."""

import json
import os
import sys

from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

MODEL = os.environ["AGENT_MODEL"]
QUESTION = "What is 6 times 7, and what is 8 times 9?"
calls = []


class Product(BaseModel):
    """A product and its factors."""

    a: int
    b: int
    product: int


def calculator(a: int, b: int) -> int:
    """Multiplies two numbers."""
    calls.append([a, b])
    return a * b


def agent(model):
    graph = create_agent(model, tools=[calculator], system_prompt="You calculate.")
    state = graph.invoke({"messages": [("user", QUESTION)]})
    return state["messages"][-1].text


def agent_stream(model):
    graph = create_agent(model, tools=[calculator])
    parts = graph.stream({"messages": [("user", QUESTION)]}, stream_mode="messages")
    return [part.text for part, _ in parts if part.type == "AIMessageChunk" and part.text]


def stream(model):
    return [part.text for part in model.stream(QUESTION) if part.text]


def structured(model):
    return model.with_structured_output(Product).invoke(QUESTION).model_dump()


SCENARIOS = {run.__name__: run for run in (agent, agent_stream, stream, structured)}
MODELS = {
    "openai": lambda: ChatOpenAI(model=MODEL),
    "openai-responses": lambda: ChatOpenAI(model=MODEL, use_responses_api=True),
    "anthropic": lambda: ChatAnthropic(model=MODEL, max_tokens=500),
}

if __name__ == "__main__":
    results = {name: SCENARIOS[name](MODELS[sys.argv[1]]()) for name in sys.argv[2:] or SCENARIOS}
    print(json.dumps({**results, "calls": calls}))
