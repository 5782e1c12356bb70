"""An agent on LiteLLM's Python package. Usage: litellm_agent.py openai|anthropic [SCENARIO...]."""

import json
import os
import sys

import litellm
from pydantic import BaseModel

QUESTION = {"role": "user", "content": "What is 6 times 7, and what is 8 times 9?"}
TOOL = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Multiplies two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
calls = []


class Product(BaseModel):
    """A product and its factors."""

    a: int
    b: int
    product: int


def loop(ask):
    """Calls the calculator as long as the model wants it; returns the last message."""
    messages = [QUESTION]
    while True:
        message = ask(messages)
        if not message.tool_calls:
            return message
        messages.append(message)
        for call in message.tool_calls:
            given = json.loads(call.function.arguments)
            calls.append([given["a"], given["b"]])
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(given["a"] * given["b"])})


def agent(model):
    def ask(messages):
        return litellm.completion(model, messages, tools=[TOOL], num_retries=2).choices[0].message

    return loop(ask).content


def agent_stream(model):
    parts = []

    def ask(messages):
        parts[:] = litellm.completion(model, messages, tools=[TOOL], stream=True)
        return litellm.stream_chunk_builder(parts, messages).choices[0].message

    loop(ask)
    return [part.choices[0].delta.content for part in parts if part.choices[0].delta.content]


def stream(model):
    parts = litellm.completion(model, [QUESTION], stream=True)
    return [part.choices[0].delta.content for part in parts if part.choices[0].delta.content]


def structured(model):
    answer = litellm.completion(model, [QUESTION], response_format=Product)
    return Product.model_validate_json(answer.choices[0].message.content).model_dump()


SCENARIOS = {run.__name__: run for run in (agent, agent_stream, stream, structured)}

if __name__ == "__main__":
    model = f"{sys.argv[1]}/{os.environ['AGENT_MODEL']}"
    results = {name: SCENARIOS[name](model) for name in sys.argv[2:] or SCENARIOS}
    print(json.dumps({**results, "calls": calls}))
