"""An agent of Anthropic's API on vLLM: served by chat completions, every token recorded, prompts counted by the engine."""

from __future__ import annotations

import asyncio
from array import array
from typing import Any

import anthropic
import pytest

from tests.support.llm_proxy.harness import MODEL, RunningProxy

pytestmark = [pytest.mark.long(short=True), pytest.mark.xdist_group("vllm"), pytest.mark.timeout(720)]

TOOL: Any = {
    "name": "add",
    "strict": True,
    "input_schema": {
        "type": "object",
        "properties": {"a": {"enum": [1]}},
        "required": ["a"],
        "additionalProperties": False,
    },
}


def client(proxy: RunningProxy, key: str) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=proxy.url.removesuffix("/v1"), api_key=key, max_retries=0)


async def answered(proxy: RunningProxy, key: str, *, stream: bool, **fields: Any) -> Any:
    """Returns the message, whole or at the end of its stream."""
    cold: Any = {"model": MODEL, "extra_body": {"temperature": 0}}
    async with client(proxy, key) as agent:
        if not stream:
            return await agent.messages.create(**cold | fields)
        async with agent.messages.stream(**cold | fields) as events:
            return await events.get_final_message()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_text_is_recorded_as_the_engine_sampled_it(proxy, store, vllm, stream):
    attempt, key = proxy.attempt()
    said: list[Any] = [{"role": "user", "content": "Count to three."}]
    answer = await answered(proxy, key, stream=stream, messages=said, max_tokens=16)
    direct = await asyncio.to_thread(vllm.complete, "Count to three.", temperature=0, max_tokens=16)
    await proxy.flush(attempt)
    [(_, record)] = store.spans(attempt)
    choice = direct["choices"][0]
    assert record.usable, record.unusable_reason
    assert array("i", record.completion_token_ids).tolist() == choice["token_ids"]
    assert array("i", record.prompt_token_ids).tolist() == direct["prompt_token_ids"]
    assert "".join(block.text for block in answer.content) == choice["message"]["content"]
    assert answer.stop_reason == ("max_tokens" if choice["finish_reason"] == "length" else "end_turn")
    assert answer.usage.output_tokens == direct["usage"]["completion_tokens"]
    assert answer.usage.input_tokens == direct["usage"]["prompt_tokens"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_tool_is_called_and_its_result_goes_back(proxy, store, stream):
    attempt, key = proxy.attempt()
    said: list[Any] = [{"role": "user", "content": "one"}]
    chosen = {"type": "tool", "name": "add"}
    first = await answered(proxy, key, stream=stream, messages=said, max_tokens=400, tools=[TOOL], tool_choice=chosen)
    [call] = [block for block in first.content if block.type == "tool_use"]
    assert (call.name, call.input, first.stop_reason) == ("add", {"a": 1}, "tool_use")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "1"}
    said += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    last = await answered(proxy, key, stream=stream, messages=said, max_tokens=8, tools=[TOOL])
    assert last.stop_reason
    await proxy.flush(attempt)
    records = [record for _, record in store.spans(attempt)]
    assert [record.usable for record in records] == [True, True]


async def test_a_prompt_is_counted_by_the_engine_as_it_will_be_read(proxy, store):
    attempt, key = proxy.attempt()
    asked: dict[str, Any] = {
        "system": "Be brief.",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Count to three."}]}],
    }
    async with client(proxy, key) as agent:
        counted = await agent.messages.count_tokens(model=MODEL, **asked)
        answer = await agent.messages.create(model=MODEL, max_tokens=4, **asked)
    await proxy.flush(attempt)
    assert counted.input_tokens == answer.usage.input_tokens
    [record] = [record for _, record in store.spans(attempt) if record is not None]
    assert record.usable, record.unusable_reason
    assert counted.input_tokens == len(array("i", record.prompt_token_ids))
