"""An agent on AutoGen. Usage: autogen_agent.py [SCENARIO...]."""

import asyncio
import json
import os
import sys

from autogen_agentchat.agents import AssistantAgent
from autogen_core.models import ModelFamily, UserMessage
from autogen_ext.models.openai import OpenAIChatCompletionClient
from pydantic import BaseModel

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


async def agent(model):
    assistant = AssistantAgent("assistant", model_client=model, tools=[calculator], reflect_on_tool_use=True)
    result = await assistant.run(task=QUESTION)
    return result.messages[-1].content


async def agent_stream(model):
    assistant = AssistantAgent(
        "assistant", model_client=model, tools=[calculator], reflect_on_tool_use=True, model_client_stream=True
    )
    events = [event async for event in assistant.run_stream(task=QUESTION)]
    return [event.content for event in events if getattr(event, "type", "") == "ModelClientStreamingChunkEvent"]


async def stream(model):
    parts = [part async for part in model.create_stream([UserMessage(content=QUESTION, source="user")])]
    return [part for part in parts if isinstance(part, str)]


async def structured(model):
    assistant = AssistantAgent("assistant", model_client=model, output_content_type=Product)
    result = await assistant.run(task=QUESTION)
    return result.messages[-1].content.model_dump()


SCENARIOS = {run.__name__: run for run in (agent, agent_stream, stream, structured)}


async def main(names):
    info = {
        "vision": False,
        "function_calling": True,
        "json_output": True,
        "family": ModelFamily.UNKNOWN,
        "structured_output": True,
    }
    model = OpenAIChatCompletionClient(model=os.environ["AGENT_MODEL"], model_info=info)
    results = {name: await SCENARIOS[name](model) for name in names}
    await model.close()
    print(json.dumps({**results, "calls": calls}))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:] or SCENARIOS))
