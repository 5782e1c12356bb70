"""An agent of the Responses API on Anthropic's models: by chat completions to messages, and back."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from openai.types.responses import Response

from tests.support.llm_proxy.anthropic_world import CLAUDE, AnthropicWorld, anthropic_world
from tests.support.llm_proxy.backend import Backend
from tests.support.llm_proxy.fake_store import FakeStore

TOOL: Any = {
    "type": "function",
    "name": "look",
    "strict": False,
    "parameters": {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]},
}


@pytest.fixture
async def world(store: FakeStore, backend: Backend) -> AsyncIterator[AnthropicWorld]:
    """Yields a proxy before Anthropic."""
    async with anthropic_world(store, backend) as running:
        yield running


async def answered(agent: openai.AsyncOpenAI, *, stream: bool, **fields: Any) -> Response:
    """Returns the response, whole or at the end of its stream, whose events must be numbered without a gap."""
    if not stream:
        return await agent.responses.create(model=CLAUDE, **fields)
    async with agent.responses.stream(model=CLAUDE, **fields) as events:
        numbers = [event.sequence_number async for event in events]
        final = await events.get_final_response()
    assert numbers == list(range(len(numbers)))
    return final


@pytest.mark.parametrize("stream", [False, True])
async def test_a_text_and_its_usage(world: AnthropicWorld, stream: bool) -> None:
    async with world.openai_agent() as agent:
        answer = await answered(agent, stream=stream, input="hello", instructions="be brief", max_output_tokens=500)
    Response.model_validate(answer.model_dump(mode="json", by_alias=True, exclude_unset=True))
    assert answer.status == "completed"
    assert "hello" in answer.output_text
    assert answer.usage is not None
    assert answer.usage.output_tokens > 0
    sent = world.vendor.received[-1].body
    assert (sent["max_tokens"], sent["messages"][0]["role"]) == (500, "user")
    assert "be brief" in json.dumps(sent["system"])


@pytest.mark.parametrize("stream", [False, True])
async def test_a_function_is_called_and_its_result_goes_back(world: AnthropicWorld, stream: bool) -> None:
    said: list[Any] = [{"role": "user", "content": "hello"}]
    async with world.openai_agent() as agent:
        first = await answered(agent, stream=stream, input=said, tools=[TOOL])
        calls = [item for item in first.output if item.type == "function_call"]
        assert [call.name for call in calls] == ["look"]
        assert isinstance(json.loads(calls[0].arguments), dict)
        said += [item.model_dump(exclude_none=True, exclude={"parsed_arguments", "parsed"}) for item in first.output]
        said.append({"type": "function_call_output", "call_id": calls[0].call_id, "output": "a tree"})
        last = await answered(agent, stream=stream, input=said, tools=[TOOL])
    assert last.output_text
    assert "a tree" in json.dumps(world.vendor.received[-1].body["messages"][-1])
