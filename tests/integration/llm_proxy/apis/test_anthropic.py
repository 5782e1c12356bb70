"""Features of the Messages API only, and chat completions on Anthropic's service; the rest is in `test_dialects`."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import anthropic
import openai
import pytest
from anthropic import beta_async_tool

from tests.support.llm_proxy.fake_store import FakeStore
from tests.support.llm_proxy.harness import MODEL
from tests.support.llm_proxy.vendor_world import CLAUDE, VendorWorld
from tests.support.llm_proxy.vendors.anthropic import SIGNATURE, THOUGHT
from tests.support.llm_proxy.vendors.anthropic_dialect import accumulated

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
TOOL: Any = {
    "name": "calculate",
    "description": "Calculates.",
    "input_schema": {"type": "object", "properties": {"input": {"type": "string"}}},
}
FUNCTION: Any = {"type": "function", "function": {"name": "calculate", "parameters": TOOL["input_schema"]}}


async def streamed(world: VendorWorld, key: str, body: dict[str, Any]) -> bytes:
    """Returns the bytes of a stream."""
    headers = {"x-api-key": key}
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{world.anthropic_url}/v1/messages", json=body, headers=headers) as answer,
    ):
        assert answer.content_type == "text/event-stream"
        return await answer.read()


# Anthropic's client on Anthropic's service.


async def test_an_answer_passes_byte_for_byte_with_the_callers_version_and_betas(world: VendorWorld) -> None:
    async with world.anthropic_agent() as agent:
        raw = await agent.messages.with_raw_response.create(
            model=CLAUDE, max_tokens=64, messages=HELLO, extra_headers={"anthropic-beta": "some-beta"}
        )
    assert await raw.read() == world.anthropic.sent[-1]
    assert (await raw.parse()).content[0].text == "You said: hello"
    [seen] = world.anthropic.received
    assert seen.body["model"] == "claude-test"
    assert seen.headers["anthropic-version"] == raw.http_request.headers["anthropic-version"]
    assert seen.headers["anthropic-beta"] == "some-beta"
    assert "Authorization" not in seen.headers


async def test_a_stream_passes_byte_for_byte(world: VendorWorld) -> None:
    body = {"model": CLAUDE, "max_tokens": 64, "messages": HELLO, "stream": True, "tools": [TOOL, TOOL | {"name": "b"}]}
    passed = await streamed(world, world.key(), body)
    assert passed == world.anthropic.sent[-1]
    assert [block["type"] for block in accumulated(passed)["content"]] == ["text", "tool_use", "tool_use"]


async def test_usage_and_stop_reason_of_a_passed_stream_are_recorded(world: VendorWorld, store: FakeStore) -> None:
    attempt, key = world.proxy.attempt()
    async with (
        world.anthropic_agent(key) as agent,
        agent.messages.stream(model=CLAUDE, max_tokens=64, messages=HELLO) as stream,
    ):
        final = await stream.get_final_message()
    await world.proxy.flush(attempt)
    [(span, _)] = store.spans(attempt)
    told = {attribute.key: attribute.value for attribute in span.attributes}
    assert told["gen_ai.provider.name"].string_value == "anthropic"
    assert told["gen_ai.usage.output_tokens"].int_value == final.usage.output_tokens
    assert told["gen_ai.usage.input_tokens"].int_value == final.usage.input_tokens + 7 + 3
    assert told["gen_ai.response.finish_reasons"].array_value.values[0].string_value == "end_turn"


async def test_a_prompt_is_counted_and_the_count_is_no_use_of_tokens(world: VendorWorld) -> None:
    attempt, key = world.proxy.attempt()
    async with world.anthropic_agent(key) as agent:
        counted = await agent.messages.count_tokens(model=CLAUDE, messages=HELLO, system="s")
        answer = await agent.messages.create(model=CLAUDE, max_tokens=9, messages=HELLO, system="s")
    assert counted.input_tokens == answer.usage.input_tokens
    summary = await world.proxy.flush(attempt)
    assert (summary.call_count, summary.unusable_count) == (2, 0)
    assert summary.completion_token_count == answer.usage.output_tokens


async def test_the_clients_tool_runner_runs_a_conversation_with_thinking(world: VendorWorld) -> None:
    asked = []

    @beta_async_tool
    async def calculate(input: str, number: int) -> str:  # noqa: A002 - the field that the vendor's model fills
        """Calculates."""
        asked.append((input, number))
        return "4"

    async with world.anthropic_agent() as agent:
        runner = agent.beta.messages.tool_runner(
            model=CLAUDE,
            max_tokens=2048,
            messages=HELLO,
            tools=[calculate],
            thinking={"type": "enabled", "budget_tokens": 1024},
        )
        last = await runner.until_done()
    assert asked == [("hello", 0)]
    assert [block.type for block in last.content] == ["thinking", "text"]
    assert last.content[1].text == "You said: 4"


# Anthropic's client on an engine.


async def test_an_engine_that_cannot_count_says_so_once_and_the_attempt_goes_on(world: VendorWorld) -> None:
    attempt, key = world.proxy.attempt()
    async with world.anthropic_agent(key, max_retries=2) as agent:
        with pytest.raises(anthropic.InternalServerError) as refused:
            await agent.messages.count_tokens(model=MODEL, messages=HELLO)
    assert refused.value.status_code == 501
    assert "does not serve count_tokens" in refused.value.message
    summary = await world.proxy.flush(attempt)
    assert (summary.call_count, summary.infra_failure_count) == (1, 0)


# OpenAI's client on Anthropic's service.


async def test_the_other_client_streams_parallel_tool_calls_and_thinks(world: VendorWorld) -> None:
    other = {"type": "function", "function": {**FUNCTION["function"], "name": "look_up"}}
    thinks = {"thinking": {"type": "enabled", "budget_tokens": 1024}}
    async with world.openai_agent() as agent:
        async with agent.chat.completions.stream(
            model=CLAUDE,
            messages=HELLO,
            tools=[FUNCTION, other],
            stream_options={"include_usage": True},
            extra_body=thinks,
        ) as stream:
            completion = await stream.get_final_completion()
        message = completion.choices[0].message
        assert message.content == "I call."
        assert message.reasoning_content == THOUGHT
        assert [call.function.name for call in message.tool_calls] == ["calculate", "look_up"]
        assert json.loads(message.tool_calls[1].function.arguments) == {"input": "hello", "number": 1}
        assert completion.choices[0].finish_reason == "tool_calls"
        assert completion.usage.completion_tokens > 0
        turns: list[Any] = [*HELLO, message.model_dump(exclude_none=True)]
        turns += [{"role": "tool", "tool_call_id": call.id, "content": "4"} for call in message.tool_calls]
        last = await agent.chat.completions.create(
            model=CLAUDE, messages=turns, tools=[FUNCTION, other], extra_body=thinks
        )
    assert last.choices[0].message.content == "You said: 4"
    assert world.anthropic.received[-1].headers["anthropic-version"] == "2023-06-01"
    back = world.anthropic.received[-1].body["messages"][1]["content"]
    assert back[0] == {"type": "thinking", "thinking": THOUGHT, "signature": SIGNATURE}
    assert [block["type"] for block in back] == ["thinking", "text", "tool_use", "tool_use"]


async def test_the_other_client_raises_the_services_refusals_and_errors_in_its_own_classes(
    world: VendorWorld,
) -> None:
    world.anthropic.switches.refusals.append(429)
    world.anthropic.switches.retry_after = "7"
    async with world.openai_agent() as agent:
        with pytest.raises(openai.RateLimitError) as refused:
            await agent.chat.completions.create(model=CLAUDE, messages=HELLO)
        assert refused.value.response.headers["retry-after"] == "7"
        assert refused.value.code == "rate_limit_error"
        with pytest.raises(openai.BadRequestError, match=r"n \(no equivalent\)"):
            await agent.chat.completions.create(model=CLAUDE, messages=HELLO, n=2)
        world.anthropic.switches.error_after_events = 4
        with pytest.raises(openai.APIError, match="Overloaded"):
            async for _ in await agent.chat.completions.create(model=CLAUDE, messages=HELLO, stream=True):
                pass
