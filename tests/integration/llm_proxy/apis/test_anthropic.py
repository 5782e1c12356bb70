"""The vendor's unmodified client, before Anthropic's service and before an engine; the other vendor's before both."""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import anthropic
import openai
import pytest
from anthropic import beta_async_tool

from fulmen.ids import DEFAULT_PROJECT
from fulmen.llm_proxy.v1 import backend_pb2
from fulmen_service_kit.tokens import Role
from tests.support.llm_proxy.anthropic_world import CLAUDE, AnthropicWorld, anthropic_world
from tests.support.llm_proxy.backend import Backend, prompt_ids_of, token_ids_of
from tests.support.llm_proxy.fake_store import FakeStore
from tests.support.llm_proxy.harness import MODEL, target
from tests.support.llm_proxy.sglang import SglangBackend
from tests.support.llm_proxy.vendors.anthropic import SIGNATURE, THOUGHT
from tests.support.llm_proxy.vendors.anthropic_dialect import accumulated, message_of

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
TOOL: Any = {
    "name": "calculate",
    "description": "Calculates.",
    "input_schema": {"type": "object", "properties": {"input": {"type": "string"}}},
}
FUNCTION: Any = {"type": "function", "function": {"name": "calculate", "parameters": TOOL["input_schema"]}}


@pytest.fixture
async def world(store: FakeStore, backend: Backend) -> AsyncIterator[AnthropicWorld]:
    """Yields a proxy before the vendor and an engine."""
    async with anthropic_world(store, backend, retry_deadline_s=0) as running:
        yield running


def ids(packed: bytes) -> list[int]:
    return array("i", packed).tolist()


async def streamed(world: AnthropicWorld, key: str, body: dict[str, Any]) -> bytes:
    """Returns the bytes of a stream."""
    headers = {"x-api-key": key}
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{world.url}/v1/messages", json=body, headers=headers) as answer,
    ):
        assert answer.content_type == "text/event-stream"
        return await answer.read()


# Anthropic's client on Anthropic's service.


async def test_an_answer_passes_byte_for_byte_with_the_callers_version_and_betas(world: AnthropicWorld) -> None:
    async with world.agent() as agent:
        raw = await agent.messages.with_raw_response.create(
            model=CLAUDE, max_tokens=64, messages=HELLO, extra_headers={"anthropic-beta": "some-beta"}
        )
    assert await raw.read() == world.vendor.sent[-1]
    assert (await raw.parse()).content[0].text == "You said: hello"
    [seen] = world.vendor.received
    assert seen.body["model"] == "claude-test"
    assert seen.headers["anthropic-version"] == raw.http_request.headers["anthropic-version"]
    assert seen.headers["anthropic-beta"] == "some-beta"
    assert "Authorization" not in seen.headers


async def test_a_stream_passes_byte_for_byte(world: AnthropicWorld) -> None:
    body = {"model": CLAUDE, "max_tokens": 64, "messages": HELLO, "stream": True, "tools": [TOOL, TOOL | {"name": "b"}]}
    passed = await streamed(world, world.key(), body)
    assert passed == world.vendor.sent[-1]
    assert [block["type"] for block in accumulated(passed)["content"]] == ["text", "tool_use", "tool_use"]


def test_the_blocking_client_talks_and_streams(store: FakeStore, backend: Backend) -> None:
    def talk(url: str, key: str) -> tuple[str, str]:
        with anthropic.Anthropic(base_url=url, api_key=key, max_retries=0) as agent:
            whole = agent.messages.create(model=CLAUDE, max_tokens=64, messages=HELLO)
            with agent.messages.stream(model=CLAUDE, max_tokens=64, messages=HELLO) as stream:
                text = "".join(stream.text_stream)
        return whole.content[0].text, text

    async def run() -> tuple[str, str]:
        async with FakeStore() as own, anthropic_world(own, backend) as world:
            return await asyncio.to_thread(talk, world.url, world.key())

    assert asyncio.run(run()) == ("You said: hello", "You said: hello")


async def test_usage_and_stop_reason_of_a_passed_stream_are_recorded(world: AnthropicWorld, store: FakeStore) -> None:
    attempt, key = world.proxy.attempt()
    async with world.agent(key) as agent, agent.messages.stream(model=CLAUDE, max_tokens=64, messages=HELLO) as stream:
        final = await stream.get_final_message()
    await world.proxy.flush(attempt)
    [(span, _)] = store.spans(attempt)
    told = {attribute.key: attribute.value for attribute in span.attributes}
    assert told["gen_ai.provider.name"].string_value == "anthropic"
    assert told["gen_ai.usage.output_tokens"].int_value == final.usage.output_tokens
    assert told["gen_ai.usage.input_tokens"].int_value == final.usage.input_tokens + 7 + 3
    assert told["gen_ai.response.finish_reasons"].array_value.values[0].string_value == "end_turn"


async def test_a_prompt_is_counted_and_the_count_is_no_use_of_tokens(world: AnthropicWorld) -> None:
    attempt, key = world.proxy.attempt()
    async with world.agent(key) as agent:
        counted = await agent.messages.count_tokens(model=CLAUDE, messages=HELLO, system="s")
        answer = await agent.messages.create(model=CLAUDE, max_tokens=9, messages=HELLO, system="s")
    assert counted.input_tokens == answer.usage.input_tokens
    summary = await world.proxy.flush(attempt)
    assert (summary.call_count, summary.unusable_count) == (2, 0)
    assert summary.completion_token_count == answer.usage.output_tokens


async def test_the_clients_tool_runner_runs_a_conversation_with_thinking(world: AnthropicWorld) -> None:
    asked = []

    @beta_async_tool
    async def calculate(input: str, number: int) -> str:  # noqa: A002 - the field that the vendor's model fills
        """Calculates."""
        asked.append((input, number))
        return "4"

    async with world.agent() as agent:
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


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (400, anthropic.BadRequestError),
        (404, anthropic.NotFoundError),
        (413, anthropic.RequestTooLargeError),
        (429, anthropic.RateLimitError),
        (500, anthropic.InternalServerError),
        (529, anthropic.OverloadedError),
    ],
)
async def test_the_services_refusals_reach_the_client_as_they_are(
    world: AnthropicWorld, status: int, error: type[anthropic.APIStatusError]
) -> None:
    world.vendor.switches.refusals.append(status)
    world.vendor.switches.retry_after = "7"
    async with world.agent() as agent:
        with pytest.raises(error) as refused:
            await agent.messages.create(model=CLAUDE, max_tokens=9, messages=HELLO)
    assert refused.value.status_code == status
    assert refused.value.response.content == world.vendor.sent[-1]
    assert refused.value.response.headers["retry-after"] == "7"
    assert refused.value.response.headers["x-fulmen-error-source"] == "backend"


@pytest.mark.parametrize("fault", ["error_after_events", "cut_after_events"])
async def test_a_stream_that_fails_midway_raises_in_the_client(world: AnthropicWorld, fault: str) -> None:
    setattr(world.vendor.switches, fault, 4)
    async with world.agent() as agent:
        with pytest.raises(anthropic.APIStatusError) as broken:
            async with agent.messages.stream(model=CLAUDE, max_tokens=9, messages=HELLO) as stream:
                await stream.get_final_message()
    assert broken.value.body["error"]["type"] in ("overloaded_error", "api_error")


# Anthropic's client and the proxy's own refusals.


async def raised(world: AnthropicWorld, key: str | None = None, **fields: Any) -> anthropic.APIStatusError:
    async with world.agent(key) as agent:
        with pytest.raises(anthropic.APIStatusError) as refused:
            await agent.messages.create(**{"model": CLAUDE, "max_tokens": 9, "messages": HELLO} | fields)
    body = refused.value.body
    assert body["type"] == "error"
    assert body["error"]["message"]
    return refused.value


async def test_each_refusal_is_raised_as_the_vendors_own_class(world: AnthropicWorld) -> None:
    reader = world.proxy.signer.issue(Role.READER, subject="r", project=DEFAULT_PROJECT, ttl_s=60)
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"key": "nonsense"}, anthropic.AuthenticationError, "authentication_error"),
        ({"key": reader}, anthropic.PermissionDeniedError, "permission_error"),
        ({"model": "unknown"}, anthropic.NotFoundError, "not_found_error"),
        ({"messages": 3, "model": MODEL}, anthropic.BadRequestError, "invalid_request_error"),
    ]
    for case, error, kind in cases:
        refused = await raised(world, **case)
        assert type(refused) is error
        assert refused.body["error"]["type"] == kind
        assert refused.response.headers["x-fulmen-error-source"] == "proxy"


async def test_limits_are_raised_as_the_vendors_own_classes(store: FakeStore, backend: Backend) -> None:
    async with anthropic_world(store, backend, max_request_bytes=1024, max_in_flight=1) as world:
        refused = await raised(world, messages=[{"role": "user", "content": "x" * 2048}])
        assert type(refused) is anthropic.RequestTooLargeError
        backend.switches.gate = asyncio.Event()
        async with world.agent() as agent:
            first = asyncio.create_task(agent.messages.create(model=MODEL, max_tokens=99, messages=HELLO))
            await backend.arrived.acquire()
            busy = await raised(world)
            backend.switches.gate.set()
            await first
    assert type(busy) is anthropic.RateLimitError
    assert busy.body["error"]["type"] == "rate_limit_error"
    assert int(busy.response.headers["retry-after"]) >= 1


async def test_a_backend_that_is_away_is_a_5xx_that_the_client_may_send_again(
    store: FakeStore, backend: Backend
) -> None:
    async with anthropic_world(store, backend, retry_deadline_s=0) as world:
        await backend.stop()
        refused = await raised(world, model=MODEL)
    assert isinstance(refused, anthropic.InternalServerError)
    assert refused.body["error"]["type"] in ("api_error", "overloaded_error")


# Anthropic's client on an engine.


async def test_an_answer_of_an_engine_is_a_message_and_its_tokens_are_captured(
    world: AnthropicWorld, store: FakeStore
) -> None:
    attempt, key = world.proxy.attempt()
    async with world.agent(key) as agent:
        raw = await agent.messages.with_raw_response.create(
            model=MODEL, max_tokens=64, messages=HELLO, system="Be brief.", extra_body={"temperature": 0.5}
        )
    message = message_of(await raw.read())
    summary = await world.proxy.flush(attempt)

    assert message["content"] == [{"type": "text", "text": "You said: hello"}]
    assert (message["stop_reason"], message["usage"]["output_tokens"]) == ("end_turn", 15)
    [(_, record)] = store.spans(attempt)
    assert record is not None
    assert record.usable, record.unusable_reason
    assert ids(record.completion_token_ids) == token_ids_of("You said: hello")
    prompt = [{"role": "system", "content": "Be brief."}, *HELLO]
    assert ids(record.prompt_token_ids) == prompt_ids_of(prompt)
    assert json.loads(record.request_json)["messages"] == prompt
    assert record.temperature == pytest.approx(0.5)
    assert (summary.unusable_count, summary.completion_token_count) == (0, 15)


async def test_a_stream_of_an_engine_is_captured_and_says_nothing_of_tokens(
    world: AnthropicWorld, store: FakeStore
) -> None:
    attempt, key = world.proxy.attempt()
    body = {"model": MODEL, "max_tokens": 64, "messages": HELLO, "stream": True}
    stream = await streamed(world, key, body)
    await world.proxy.flush(attempt)
    message = accumulated(stream)
    assert message["content"][0]["text"] == "You said: hello"
    assert (message["stop_reason"], message["usage"]["output_tokens"]) == ("end_turn", 15)
    assert message["usage"]["input_tokens"] == len(prompt_ids_of(HELLO))
    assert b"token_ids" not in stream
    assert b"logprobs" not in stream
    [(_, record)] = store.spans(attempt)
    assert record is not None
    assert record.usable, record.unusable_reason
    assert ids(record.completion_token_ids) == token_ids_of("You said: hello")


async def test_the_client_streams_a_tool_call_of_an_engine_and_hands_its_result_back(
    world: AnthropicWorld, store: FakeStore
) -> None:
    attempt, key = world.proxy.attempt()
    async with world.agent(key) as agent:
        async with agent.messages.stream(model=MODEL, max_tokens=64, messages=HELLO, tools=[TOOL]) as stream:
            kinds = [event.type async for event in stream]
            first = await stream.get_final_message()
        [call] = first.content
        assert (call.type, call.name, call.input, first.stop_reason) == (
            "tool_use",
            "calculate",
            {"input": "hello"},
            "tool_use",
        )
        assert kinds.count("input_json") == len(json.dumps({"input": "hello"}))
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "4"}
        turns: list[Any] = [
            *HELLO,
            {"role": "assistant", "content": first.content},
            {"role": "user", "content": [result]},
        ]
        last = await agent.messages.create(model=MODEL, max_tokens=64, messages=turns, tools=[TOOL])
    assert last.content[0].text == "You said: 4"
    assert world.backend.received[-1].body["messages"][-1] == {"role": "tool", "tool_call_id": "call_1", "content": "4"}
    await world.proxy.flush(attempt)
    records = [record for _, record in store.spans(attempt)]
    assert [record.usable for record in records if record] == [True, True]


async def test_the_clients_tool_runner_runs_a_conversation_with_an_engine(world: AnthropicWorld) -> None:
    @beta_async_tool
    async def calculate(input: str) -> str:  # noqa: A002 - the field that the model fills
        """Calculates."""
        return input.upper()

    async with world.agent() as agent:
        runner = agent.beta.messages.tool_runner(model=MODEL, max_tokens=64, messages=HELLO, tools=[calculate])
        last = await runner.until_done()
    assert last.content[0].text == "You said: HELLO"
    assert [m["role"] for m in world.backend.received[-1].body["messages"]] == ["user", "assistant", "tool"]


async def test_an_engine_that_breaks_off_or_answers_nonsense_raises_in_the_client(world: AnthropicWorld) -> None:
    world.backend.switches.cut_after_events = 4
    async with world.agent() as agent:
        with pytest.raises(anthropic.APIStatusError) as broken:
            async with agent.messages.stream(model=MODEL, max_tokens=64, messages=HELLO) as stream:
                await stream.get_final_message()
    assert broken.value.body["error"]["type"] == "api_error"
    assert broken.value.body["error"]["source"] == "backend"


async def test_an_engines_refusal_is_worded_as_anthropics(world: AnthropicWorld) -> None:
    world.backend.switches.refusals.append(400)
    refused = await raised(world, model=MODEL)
    assert type(refused) is anthropic.BadRequestError
    assert refused.body["error"]["message"] == "The backend answers 400."
    assert refused.response.headers["x-fulmen-error-source"] == "backend"


async def test_an_engine_that_cannot_count_says_so_once_and_the_attempt_goes_on(world: AnthropicWorld) -> None:
    attempt, key = world.proxy.attempt()
    async with world.agent(key, max_retries=2) as agent:
        with pytest.raises(anthropic.InternalServerError) as refused:
            await agent.messages.count_tokens(model=MODEL, messages=HELLO)
    assert refused.value.status_code == 501
    assert "does not serve count_tokens" in refused.value.message
    summary = await world.proxy.flush(attempt)
    assert (summary.call_count, summary.infra_failure_count) == (1, 0)


async def test_a_stream_of_a_server_that_captures_whole_answers_only_is_a_stream_and_captured(
    world: AnthropicWorld, store: FakeStore
) -> None:
    async with SglangBackend() as sglang:
        await world.proxy.register("two", sglang.url, engine=backend_pb2.ENGINE_SGLANG)
        await world.proxy.put_route(target("two"), model="whole-only")
        attempt, key = world.proxy.attempt()
        body = {"model": "whole-only", "max_tokens": 64, "messages": HELLO, "stream": True}
        message = accumulated(await streamed(world, key, body))
        await world.proxy.flush(attempt)
    assert message["content"][0]["text"] == "You said: hello"
    assert message["usage"]["output_tokens"] == 15
    [(_, record)] = store.spans(attempt)
    assert record is not None
    assert record.usable, record.unusable_reason


# OpenAI's client on Anthropic's service.


async def test_the_other_client_gets_an_answer_with_usage(world: AnthropicWorld) -> None:
    async with world.openai_agent() as agent:
        answer = await agent.chat.completions.create(
            model=CLAUDE, messages=[{"role": "system", "content": "s"}, *HELLO], stop="lo", temperature=1.5
        )
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("You said: hel", "stop")
    assert answer.usage.prompt_tokens_details.cached_tokens == 7
    [seen] = world.vendor.received
    assert (seen.body["temperature"], seen.body["stop_sequences"]) == (1.0, ["lo"])
    assert seen.headers["anthropic-version"] == "2023-06-01"


async def test_the_other_client_streams_parallel_tool_calls_and_thinks(world: AnthropicWorld) -> None:
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
    back = world.vendor.received[-1].body["messages"][1]["content"]
    assert back[0] == {"type": "thinking", "thinking": THOUGHT, "signature": SIGNATURE}
    assert [block["type"] for block in back] == ["thinking", "text", "tool_use", "tool_use"]


async def test_the_other_client_raises_the_services_refusals_and_errors_in_its_own_classes(
    world: AnthropicWorld,
) -> None:
    world.vendor.switches.refusals.append(429)
    world.vendor.switches.retry_after = "7"
    async with world.openai_agent() as agent:
        with pytest.raises(openai.RateLimitError) as refused:
            await agent.chat.completions.create(model=CLAUDE, messages=HELLO)
        assert refused.value.response.headers["retry-after"] == "7"
        assert refused.value.code == "rate_limit_error"
        with pytest.raises(openai.BadRequestError, match=r"n \(no equivalent\)"):
            await agent.chat.completions.create(model=CLAUDE, messages=HELLO, n=2)
        world.vendor.switches.error_after_events = 4
        with pytest.raises(openai.APIError, match="Overloaded"):
            async for _ in await agent.chat.completions.create(model=CLAUDE, messages=HELLO, stream=True):
                pass
