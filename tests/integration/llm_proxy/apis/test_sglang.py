"""Agents on a server in the shape of SGLang, streams included."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from fulmen.llm_proxy.v1 import backend_pb2
from tests.support.llm_proxy.backend import logprob_of, prompt_ids_of, reply_to, token_ids_of
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


async def assert_recorded(proxy: RunningProxy, store: FakeStore, attempt: str) -> None:
    """Checks that one call was captured to the token."""
    await proxy.flush(attempt)
    [(_, record)] = store.spans(attempt)
    expected = token_ids_of(reply_to(MESSAGES))
    assert record is not None
    assert (record.usable, record.unusable_reason) == (True, "")
    assert array("i", record.prompt_token_ids).tolist() == prompt_ids_of(MESSAGES)
    assert array("i", record.completion_token_ids).tolist() == expected
    assert array("f", record.completion_logprobs).tolist() == pytest.approx(
        [logprob_of(token, i) for i, token in enumerate(expected)], rel=1e-6
    )
    assert [(r.version, r.start, r.end) for r in record.policy_versions] == [(1, 0, len(expected))]


async def test_a_whole_answer_is_captured_and_the_agent_sees_no_token_ids(
    proxy: RunningProxy, store: FakeStore
) -> None:
    attempt, key = proxy.attempt()
    status, answer = await proxy.chat(key, "hello")
    assert status == 200
    assert answer["choices"][0]["message"]["content"] == reply_to(MESSAGES)
    assert not {"token_ids", "prompt_token_ids"} & answer["choices"][0].keys()
    await assert_recorded(proxy, store, attempt)


async def test_a_stream_is_captured_though_the_server_streams_no_token_ids(
    proxy: RunningProxy, store: FakeStore, sglang: SglangBackend
) -> None:
    attempt, key = proxy.attempt()
    events = await chunks(proxy, key, stream_options={"include_usage": True})

    assert "".join(c.delta.content or "" for event in events for c in event.choices) == reply_to(MESSAGES)
    assert [c.finish_reason for event in events for c in event.choices] == [None, "stop"]
    assert events[0].choices[0].delta.role == "assistant"
    assert events[-1].usage.completion_tokens == len(reply_to(MESSAGES))
    assert not any({"token_ids", "prompt_token_ids"} & c.model_extra.keys() for event in events for c in event.choices)
    [received] = sglang.received
    assert not {"stream", "stream_options"} & received.body.keys()
    await assert_recorded(proxy, store, attempt)


async def test_a_stream_without_usage_asked_for_has_none(proxy: RunningProxy) -> None:
    _, key = proxy.attempt()
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
    [(_, record)] = store.spans(attempt)
    assert record is not None
    assert [part.version for part in record.policy_versions] == [1, 2]
    assert (record.usable, record.unusable_reason) == (False, "policy_version_changed")
