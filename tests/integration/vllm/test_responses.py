"""An agent of the Responses API on vLLM: served by chat completions, every token recorded."""

from __future__ import annotations

import asyncio
import json
from array import array
from typing import Any

import openai
import pytest

from tests.support.llm_proxy.harness import MODEL, RunningProxy

pytestmark = [pytest.mark.long(short=True), pytest.mark.xdist_group("vllm"), pytest.mark.timeout(720)]

FUNCTION: Any = {
    "type": "function",
    "name": "add",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"a": {"enum": [1]}},
        "required": ["a"],
        "additionalProperties": False,
    },
}


async def answered(proxy: RunningProxy, key: str, *, stream: bool, **fields: Any) -> Any:
    """Returns the response, whole or at the end of its stream."""
    async with openai.AsyncOpenAI(base_url=proxy.url, api_key=key, max_retries=0) as agent:
        if not stream:
            return await agent.responses.create(model=MODEL, temperature=0, **fields)
        # Not by the client's own helper, which takes an answer that was cut for none.
        stream_of = await agent.responses.create(model=MODEL, temperature=0, stream=True, **fields)
        events = [event async for event in stream_of]
    assert events[-1].type in ("response.completed", "response.incomplete")
    return events[-1].response


@pytest.mark.parametrize("stream", [False, True])
async def test_a_text_is_recorded_as_the_engine_sampled_it(proxy, store, vllm, stream):
    attempt, key = proxy.attempt()
    answer = await answered(proxy, key, stream=stream, input="Count to three.", max_output_tokens=16)
    direct = await asyncio.to_thread(vllm.complete, "Count to three.", temperature=0, max_tokens=16)
    await proxy.flush(attempt)
    [(_, record)] = store.spans(attempt)
    choice = direct["choices"][0]
    assert record.usable, record.unusable_reason
    assert array("i", record.completion_token_ids).tolist() == choice["token_ids"]
    assert array("i", record.prompt_token_ids).tolist() == direct["prompt_token_ids"]
    assert answer.output_text == choice["message"]["content"]
    assert answer.status == ("incomplete" if choice["finish_reason"] == "length" else "completed")
    assert answer.usage.output_tokens == direct["usage"]["completion_tokens"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_function_is_called_and_its_result_goes_back(proxy, store, stream):
    attempt, key = proxy.attempt()
    said: list[Any] = [{"role": "user", "content": "one"}]
    chosen = {"type": "function", "name": "add"}
    first = await answered(proxy, key, stream=stream, input=said, tools=[FUNCTION], tool_choice=chosen)
    [call] = [item for item in first.output if item.type == "function_call"]
    said += [item.model_dump(exclude_none=True, exclude={"parsed_arguments", "parsed"}) for item in first.output]
    said.append({"type": "function_call_output", "call_id": call.call_id, "output": "1"})
    last = await answered(proxy, key, stream=stream, input=said, tools=[FUNCTION], max_output_tokens=8)
    await proxy.flush(attempt)
    assert (call.name, json.loads(call.arguments)) == ("add", {"a": 1})
    assert last.output
    records = [record for _, record in store.spans(attempt)]
    assert [record.unusable_reason for record in records] == ["", ""]
