"""Agents on a server in the shape of SGLang, streams included."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from fulmen.llm_proxy.v1 import backend_pb2
from tests.support.llm_proxy.backend import prompt_ids_of, reply_to, token_ids_of
from tests.support.llm_proxy.fake_store import FakeStore
from tests.support.llm_proxy.harness import MODEL, RunningProxy, running_proxy, target
from tests.support.llm_proxy.sglang import SglangBackend

MESSAGES: list[Any] = [{"role": "user", "content": "hello"}]
TOOL: Any = {"type": "function", "function": {"name": "calculate", "parameters": {"type": "object"}}}
DEADLINE_S = 30


@pytest.fixture
async def sglang() -> AsyncIterator[SglangBackend]:
    """Yields a server."""
    async with SglangBackend() as running:
        yield running


@pytest.fixture
async def proxy(store: FakeStore, sglang: SglangBackend) -> AsyncIterator[RunningProxy]:
    """Yields a proxy with a trainable route to the server, policy version 1."""
    async with running_proxy(store.target) as running:
        await running.register("one", sglang.url, engine=backend_pb2.ENGINE_SGLANG)
        await running.put_route(target("one"))
        yield running


async def chunks(proxy: RunningProxy, key: str, **fields: Any) -> list[Any]:
    async with asyncio.timeout(DEADLINE_S), openai.AsyncOpenAI(base_url=proxy.url, api_key=key, max_retries=0) as agent:
        stream = await agent.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True, **fields)
        return [chunk async for chunk in stream]


async def test_a_captured_stream_ends_as_streams_do_and_has_its_usage_if_asked_for(proxy: RunningProxy) -> None:
    _, key = proxy.attempt()
    *events, last = await chunks(proxy, key, stream_options={"include_usage": True})
    assert [choice.finish_reason for event in events for choice in event.choices] == [None, "stop"]
    assert (events[0].choices[0].delta.role, last.usage.completion_tokens) == ("assistant", len(reply_to(MESSAGES)))
    assert all(event.choices and event.usage is None for event in await chunks(proxy, key))


async def test_an_agent_that_asks_for_token_ids_in_its_stream_gets_them(proxy: RunningProxy) -> None:
    _, key = proxy.attempt()
    events = await chunks(proxy, key, logprobs=True, extra_body={"return_token_ids": True})
    extra = events[0].choices[0].model_extra
    assert extra["token_ids"] == token_ids_of(reply_to(MESSAGES))
    assert extra["prompt_token_ids"] == prompt_ids_of(MESSAGES)
    assert len(events[0].choices[0].logprobs.content) == len(extra["token_ids"])


async def test_a_tool_call_is_streamed(proxy: RunningProxy) -> None:
    _, key = proxy.attempt()
    events = await chunks(proxy, key, tools=[TOOL])
    [call] = events[0].choices[0].delta.tool_calls
    assert (call.index, call.type, call.function.name) == (0, "function", "calculate")
    assert events[1].choices[0].finish_reason == "tool_calls"


async def test_a_stream_that_is_not_captured_is_the_servers_own(proxy: RunningProxy, sglang: SglangBackend) -> None:
    await proxy.put_route(target("one", policy=""))
    _, key = proxy.attempt()
    events = await chunks(proxy, key)
    assert len(events) > 2
    assert sglang.received[0].body["stream"] is True


async def test_a_refusal_reaches_an_agent_that_wanted_a_stream(proxy: RunningProxy, sglang: SglangBackend) -> None:
    _, key = proxy.attempt()
    sglang.switches.refusals.append(422)
    with pytest.raises(openai.UnprocessableEntityError):
        await chunks(proxy, key)


async def test_weights_that_changed_while_an_answer_was_made_mark_it(
    proxy: RunningProxy, store: FakeStore, sglang: SglangBackend
) -> None:
    attempt, key = proxy.attempt()
    sglang.weight_version = "2"
    await proxy.chat(key, "hello")
    await proxy.flush(attempt)
    record = store.record(attempt)
    assert [part.version for part in record.policy_versions] == [1, 2]
    assert (record.usable, record.unusable_reason) == (False, "policy_version_changed")
