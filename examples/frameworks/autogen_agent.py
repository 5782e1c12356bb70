"""An agent on AutoGen: it answers with the help of a calculator.

By hand: echo '{"question": "What is 6 times 7, and what is 8 times 9?"}' | python autogen_agent.py
"""

import asyncio
import json
import os
import sys

from autogen_agentchat.agents import AssistantAgent
from autogen_core.models import ModelFamily
from autogen_ext.models.openai import OpenAIChatCompletionClient

INFO = {
    "vision": False,
    "function_calling": True,
    "json_output": True,
    "family": ModelFamily.UNKNOWN,
    "structured_output": True,
}


def calculator(a: int, b: int) -> int:
    """Multiplies two numbers below 100."""
    if max(a, b) >= 100:
        raise ValueError("the calculator takes numbers below 100")
    return a * b


async def solve(task):
    model = OpenAIChatCompletionClient(model=os.environ.get("AGENT_MODEL", "gpt-4.1-mini"), model_info=INFO)
    assistant = AssistantAgent("assistant", model_client=model, tools=[calculator], reflect_on_tool_use=True)
    result = await assistant.run(task=task["question"])
    await model.close()
    return result.messages[-1].content


if __name__ == "__main__":
    print(asyncio.run(solve(json.load(sys.stdin))))
