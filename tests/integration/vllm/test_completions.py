"""Text completions of vLLM, with the token ids of their prompts and answers; and a record in a real store."""

from __future__ import annotations

import asyncio
from array import array
from typing import Any

import openai
import pytest

from fulmen.store.v1 import span_service_pb2
from fulmen.type.v1.model_call_pb2 import ModelCallRecord
from tests.support.algorithm.vllm import BACKEND, MODEL, VllmServer
from tests.support.llm_proxy.fake_store import batch_of
from tests.support.llm_proxy.harness import MODEL as PUBLIC_MODEL
from tests.support.llm_proxy.harness import running_proxy, target
from tests.support.store import running as real

pytestmark = [pytest.mark.long(short=True), pytest.mark.xdist_group("vllm"), pytest.mark.timeout(720)]

GREEDY = {"temperature": 0, "max_tokens": 24}
SEEDED = {"temperature": 1.0, "seed": 7, "max_tokens": 24, "n": 2}
PROMPT = "Once upon a time"


def ids(packed: bytes) -> list[int]:
    return array("i", packed).tolist()


async def direct(vllm: VllmServer, **fields: Any) -> dict[str, Any]:
    body = {"model": MODEL, "prompt": PROMPT, "return_token_ids": True, "logprobs": 0, **fields}
    return await asyncio.to_thread(vllm.ask, "/v1/completions", body)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
async def test_a_text_completion_is_recorded_as_vllm_gives_it(proxy, store, vllm, sampling, stream):
    attempt, key = proxy.attempt()
    texts: dict[int, str] = {}
    async with openai.AsyncOpenAI(base_url=proxy.url, api_key=key, max_retries=0) as agent:
        answer = await agent.completions.create(model=PUBLIC_MODEL, prompt=PROMPT, stream=stream, **sampling)
        for chunk in [answer] if isinstance(answer, openai.types.Completion) else [part async for part in answer]:
            for choice in chunk.choices:
                assert "token_ids" not in choice.model_extra
                assert "prompt_token_ids" not in choice.model_extra
                assert choice.logprobs is None
                texts[choice.index] = texts.get(choice.index, "") + choice.text
    beside = await direct(vllm, **sampling)
    await proxy.flush(attempt)

    records = [record for _, record in store.spans(attempt)]
    assert len(records) == len(beside["choices"])
    for record, choice in zip(records, beside["choices"], strict=True):
        assert record is not None
        assert (record.usable, record.unusable_reason) == (True, "")
        assert texts[choice["index"]] == choice["text"]
        assert ids(record.prompt_token_ids) == choice["prompt_token_ids"]
        assert ids(record.completion_token_ids) == choice["token_ids"]
        assert array("f", record.completion_logprobs).tolist() == pytest.approx(
            choice["logprobs"]["token_logprobs"], abs=1e-4
        )
        assert record.finish_reason == choice["finish_reason"]


async def test_a_call_is_read_back_from_a_real_store_as_vllm_sampled_it(vllm, database_url):
    async with asyncio.timeout(60), real.running_store(database_url) as store:
        stubs = await store.stubs()
        await real.create(stubs)
        [held] = await (await real.Runner(stubs).open()).take(1)
        async with running_proxy(store.target, signing_key=real.SIGNING_KEY) as proxy:
            await proxy.register(BACKEND, vllm.url)
            await proxy.put_route(target(BACKEND))
            status, _ = await proxy.chat(held.attempt_key, PROMPT, **GREEDY)
            assert status == 200
            assert (await proxy.flush(held.attempt)).flushed
        stream = stubs.spans.StreamSpans(span_service_pb2.StreamSpansRequest(parents=[held.attempt]))
        chunks = [chunk async for message in stream for chunk in message.chunks]

    [record] = [ModelCallRecord.FromString(span.model_call) for chunk in chunks for span in batch_of(chunk).spans]
    beside = await asyncio.to_thread(vllm.complete, PROMPT, **GREEDY)
    assert record.usable
    assert ids(record.prompt_token_ids) == beside["prompt_token_ids"]
    assert ids(record.completion_token_ids) == beside["choices"][0]["token_ids"]
