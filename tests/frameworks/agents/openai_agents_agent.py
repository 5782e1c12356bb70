"""An agent on OpenAI's Agents SDK. Usage: openai_agents_agent.py responses|chat_completions [SCENARIO...]."""

import asyncio
import json
import os
import sys

from agents import Agent, Runner, function_tool, set_default_openai_api
from pydantic import BaseModel

QUESTION = "What is 6 times 7, and what is 8 times 9?"
calls = []


class Product(BaseModel):
    """A product and its factors."""

    a: int
    b: int
    product: int


@function_tool
def calculator(a: int, b: int) -> int:
    """Multiplies two numbers."""
    calls.append([a, b])
    return a * b


def assistant(**options):
    return Agent(name="Calculator", instructions="You calculate.", model=os.environ["AGENT_MODEL"], **options)


async def agent():
    result = await Runner.run(assistant(tools=[calculator]), QUESTION)
    return result.final_output


async def deltas_of(run):
    return [
        event.data.delta
        async for event in run.stream_events()
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
    ]


async def agent_stream():
    return await deltas_of(Runner.run_streamed(assistant(tools=[calculator]), QUESTION))


async def stream():
    return await deltas_of(Runner.run_streamed(assistant(), QUESTION))


async def structured():
    result = await Runner.run(assistant(output_type=Product), QUESTION)
    return result.final_output.model_dump()


SCENARIOS = {run.__name__: run for run in (agent, agent_stream, stream, structured)}


async def main(api, names):
    set_default_openai_api(api)
    results = {name: await SCENARIOS[name]() for name in names}
    print(json.dumps({**results, "calls": calls}))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2:] or SCENARIOS))
