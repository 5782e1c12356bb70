"""Records of vLLM's answers equal the answers, token by token."""

from __future__ import annotations

import asyncio
import json
from array import array
from typing import Any

import openai
import pytest

from fulmen.type.v1.model_call_pb2 import ModelCallRecord
from tests.support.algorithm.vllm import MAX_MODEL_LEN, VllmServer, settled
from tests.support.llm_proxy.fake_store import FakeStore
from tests.support.llm_proxy.harness import MODEL, RunningProxy

pytestmark = [pytest.mark.long(short=True), pytest.mark.xdist_group("vllm"), pytest.mark.timeout(720)]

GREEDY = {"temperature": 0, "max_tokens": 24}
SEEDED = {"temperature": 1.0, "seed": 7, "max_tokens": 24}
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"enum": [1]}},
            "required": ["a"],
            "additionalProperties": False,
        },
    },
}
NAMED = {"type": "function", "function": {"name": "add"}}


def client(proxy: RunningProxy, key: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=proxy.url, api_key=key, max_retries=0)


def ids(packed: bytes) -> list[int]:
    return array("i", packed).tolist()


def floats(packed: bytes) -> list[float]:
    return array("f", packed).tolist()


def logprobs_of(choice: dict[str, Any]) -> list[float]:
    return [entry["logprob"] for entry in choice["logprobs"]["content"]]


async def direct(vllm: VllmServer, content: str, **fields: Any) -> dict[str, Any]:
    return await asyncio.to_thread(vllm.complete, content, **fields)


async def recorded(proxy: RunningProxy, store: FakeStore, attempt: str) -> list[ModelCallRecord]:
    await proxy.flush(attempt)
    records = [record for _, record in store.spans(attempt)]
    assert all(record is not None for record in records)
    return [record for record in records if record is not None]


def assert_same(record: ModelCallRecord, answer: dict[str, Any], index: int = 0) -> None:
    """Compares a record with what vLLM answered to the same request when it was asked directly."""
    choice = answer["choices"][index]
    assert (record.usable, record.unusable_reason) == (True, "")
    assert ids(record.prompt_token_ids) == answer["prompt_token_ids"]
    assert len(answer["prompt_token_ids"]) == answer["usage"]["prompt_tokens"]
    assert ids(record.completion_token_ids) == choice["token_ids"]
    assert floats(record.completion_logprobs) == pytest.approx(logprobs_of(choice), abs=1e-4)
    assert record.finish_reason == choice["finish_reason"]
    assert [(r.version, r.start, r.end) for r in record.policy_versions] == [(1, 0, len(choice["token_ids"]))]


async def read_stream(proxy: RunningProxy, key: str, content: str, **fields: Any) -> list[Any]:
    async with client(proxy, key) as agent:
        stream = await agent.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": content}], stream=True, **fields
        )
        return [chunk async for chunk in stream]


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
async def test_a_whole_answer_is_recorded_as_vllm_gives_it(proxy, store, vllm, sampling):
    attempt, key = proxy.attempt()
    status, answer = await proxy.chat(key, "What is 2+2?", **sampling)
    beside = await direct(vllm, "What is 2+2?", **sampling)

    assert status == 200
    assert answer["choices"][0]["message"] == beside["choices"][0]["message"]
    assert answer["usage"] == beside["usage"]
    assert "token_ids" not in answer["choices"][0]
    assert "prompt_token_ids" not in answer
    assert answer["choices"][0]["logprobs"] is None
    [record] = await recorded(proxy, store, attempt)
    assert_same(record, beside)


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
async def test_a_stream_brings_the_same_tokens_as_a_whole_answer(proxy, store, vllm, sampling):
    attempt, key = proxy.attempt()
    chunks = await read_stream(proxy, key, "Tell me a story", **sampling)
    beside = await direct(vllm, "Tell me a story", **sampling)

    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == beside["choices"][0]["message"]["content"]
    assert not any("token_ids" in chunk.choices[0].model_extra for chunk in chunks)
    assert not any(chunk.choices[0].logprobs for chunk in chunks)
    [record] = await recorded(proxy, store, attempt)
    assert_same(record, beside)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_each_of_several_choices_has_its_own_record(proxy, store, vllm, stream):
    attempt, key = proxy.attempt()
    fields = {**SEEDED, "n": 3}
    if stream:
        await read_stream(proxy, key, "Choose", **fields)
    else:
        await proxy.chat(key, "Choose", **fields)
    beside = await direct(vllm, "Choose", **fields)

    records = await recorded(proxy, store, attempt)
    assert len(records) == 3
    for index, record in enumerate(records):
        assert_same(record, beside, index)
    assert beside["usage"]["completion_tokens"] == sum(len(ids(r.completion_token_ids)) for r in records)


async def test_a_stop_string_ends_the_answer_and_its_tokens_are_recorded(proxy, store, vllm):
    free = await direct(vllm, "Stop soon", **GREEDY)
    text = free["choices"][0]["message"]["content"]
    stop = next(letter for letter in text[2:] if letter.isascii() and letter.isprintable())
    attempt, key = proxy.attempt()
    _, answer = await proxy.chat(key, "Stop soon", stop=[stop], **GREEDY)
    beside = await direct(vllm, "Stop soon", stop=[stop], **GREEDY)

    assert answer["choices"][0]["finish_reason"] == "stop"
    assert stop not in answer["choices"][0]["message"]["content"]
    [record] = await recorded(proxy, store, attempt)
    assert_same(record, beside)
    assert len(ids(record.completion_token_ids)) < 24


async def test_an_agent_that_asks_for_logprobs_token_ids_and_usage_gets_them(proxy, store, vllm):
    attempt, key = proxy.attempt()
    asked = {"logprobs": True, "top_logprobs": 2, "return_token_ids": True, **GREEDY}
    _, answer = await proxy.chat(key, "Show me", **asked)
    chunks = await read_stream(proxy, key, "Show me", logprobs=True, stream_options={"include_usage": True}, **GREEDY)
    beside = await direct(vllm, "Show me", top_logprobs=2, **GREEDY)

    assert answer["choices"] == beside["choices"]
    assert answer["prompt_token_ids"] == beside["prompt_token_ids"]
    streamed = [entry.logprob for chunk in chunks for c in chunk.choices if c.logprobs for entry in c.logprobs.content]
    assert streamed == pytest.approx(logprobs_of(beside["choices"][0]), abs=1e-4)
    assert chunks[-1].usage.completion_tokens == beside["usage"]["completion_tokens"]
    for record in await recorded(proxy, store, attempt):
        assert_same(record, beside)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_tool_call_is_passed_on_and_its_tokens_are_recorded(proxy, store, vllm, stream):
    attempt, key = proxy.attempt()
    fields = {"tools": [TOOL], "tool_choice": NAMED, "temperature": 0, "max_tokens": 200}
    beside = await direct(vllm, "Add", **fields)
    [wanted] = beside["choices"][0]["message"]["tool_calls"]
    if stream:
        chunks = await read_stream(proxy, key, "Add", **fields)
        parts = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
        name = "".join(part.function.name or "" for part in parts)
        arguments = "".join(part.function.arguments or "" for part in parts)
    else:
        _, answer = await proxy.chat(key, "Add", **fields)
        [call] = answer["choices"][0]["message"]["tool_calls"]
        name, arguments = call["function"]["name"], call["function"]["arguments"]

    assert (name, json.loads(arguments)) == ("add", json.loads(wanted["function"]["arguments"]))
    [record] = await recorded(proxy, store, attempt)
    assert_same(record, beside)


async def test_the_agent_gets_vllms_refusal_of_a_prompt_that_is_too_long(proxy):
    attempt, key = proxy.attempt()
    async with client(proxy, key) as agent:
        with pytest.raises(openai.BadRequestError) as refused:
            await agent.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "x" * MAX_MODEL_LEN}]
            )
    summary = await proxy.flush(attempt)

    assert refused.value.response.headers["x-fulmen-error-source"] == "backend"
    assert isinstance(refused.value.body, dict)
    assert "maximum context length" in refused.value.body["message"]
    assert (summary.call_count, summary.infra_failure_count) == (1, 0)


async def test_the_agent_gets_vllms_refusal_of_a_field_of_a_wrong_type(proxy):
    _, key = proxy.attempt()
    status, answer = await proxy.chat(key, "hello", temperature="hot")

    assert status == 400
    assert "temperature" in answer["error"]["message"]


async def test_an_agent_that_goes_away_ends_its_request_in_vllm(proxy, store, vllm):
    attempt, key = proxy.attempt()

    def ended() -> float:
        # vLLM counts requests that were given up as well, by another reason.
        return sum(
            vllm.gauge("vllm:request_success_total", labelled=f'finished_reason="{reason}"')
            for reason in ("stop", "length")
        )

    before = await asyncio.to_thread(ended)
    async with client(proxy, key) as agent:
        stream = await agent.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Go on"}],
            stream=True,
            max_tokens=MAX_MODEL_LEN - 16,
            extra_body={"ignore_eos": True},
        )
        await anext(aiter(stream))
        await settled(lambda: vllm.gauge("vllm:num_requests_running") == 1)
        await stream.close()

    await settled(lambda: vllm.gauge("vllm:num_requests_running") == 0)
    # Neither its limit nor a stop ended it.
    assert await asyncio.to_thread(ended) == before
    [record] = await recorded(proxy, store, attempt)
    assert not record.usable
    assert "incomplete" in record.unusable_reason
    assert 0 < len(ids(record.completion_token_ids)) < MAX_MODEL_LEN - 16
