"""What an agent gets, and what is recorded of it."""

from __future__ import annotations

import json
from array import array

import openai
import pytest

from fulmen.model_call import RESEND_COUNT_ATTRIBUTE
from tests.support.llm_proxy.backend import Backend, reply_to, token_ids_of
from tests.support.llm_proxy.fake_store import FakeStore
from tests.support.llm_proxy.harness import MODEL, RunningProxy, target

MESSAGES = [{"role": "user", "content": "hello wörld"}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calculate",
            "parameters": {"type": "object", "properties": {"input": {"type": "string"}}},
        },
    }
]


def client(proxy: RunningProxy, key: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=proxy.url, api_key=key, max_retries=0)


def ids(packed: bytes) -> list[int]:
    return array("i", packed).tolist()


def floats(packed: bytes) -> list[float]:
    return array("f", packed).tolist()


async def test_a_call_that_the_vendors_client_sends_again_says_so(proxy: RunningProxy, store: FakeStore) -> None:
    attempt, key = proxy.attempt()
    again = {"x-stainless-retry-count": "2"}
    async with client(proxy, key) as agent:
        await agent.chat.completions.create(model=MODEL, messages=MESSAGES, extra_headers=again)
    await proxy.flush(attempt)

    [(span, _)] = store.spans(attempt)
    assert [a.value.int_value for a in span.attributes if a.key == RESEND_COUNT_ATTRIBUTE] == [2]


async def test_the_vendors_client_calls_tools_whole_and_streamed(proxy: RunningProxy, store: FakeStore) -> None:
    attempt, key = proxy.attempt()
    async with client(proxy, key) as agent:
        whole = await agent.chat.completions.create(model=MODEL, messages=MESSAGES, tools=TOOLS)
        call = whole.choices[0].message.tool_calls[0]
        arguments = ""
        stream = await agent.chat.completions.create(model=MODEL, messages=MESSAGES, tools=TOOLS, stream=True)
        async for chunk in stream:
            for piece in chunk.choices[0].delta.tool_calls or []:
                arguments += piece.function.arguments
    summary = await proxy.flush(attempt)

    assert (call.function.name, whole.choices[0].finish_reason) == ("calculate", "tool_calls")
    assert json.loads(call.function.arguments) == json.loads(arguments) == {"input": "hello wörld"}
    assert (summary.call_count, summary.unusable_count) == (2, 0)
    streamed = json.loads(store.spans(attempt)[1][1].response_json)["choices"][0]
    assert streamed["message"]["tool_calls"][0]["function"] == {"name": "calculate", "arguments": arguments}
    assert streamed["finish_reason"] == "tool_calls"


async def test_an_agent_that_asks_for_token_ids_logprobs_and_usage_gets_them(proxy: RunningProxy) -> None:
    _, key = proxy.attempt()
    async with client(proxy, key) as agent:
        whole = await agent.chat.completions.create(
            model=MODEL, messages=MESSAGES, logprobs=True, extra_body={"return_token_ids": True}
        )
        stream = await agent.chat.completions.create(
            model=MODEL, messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    expected = token_ids_of(reply_to(MESSAGES))
    assert whole.choices[0].model_extra["token_ids"] == expected
    assert len(whole.choices[0].logprobs.content) == len(expected)
    assert chunks[-1].usage.completion_tokens == len(expected)


async def test_a_version_change_within_an_answer_is_recorded_per_token_range(
    proxy: RunningProxy, store: FakeStore, backend: Backend
) -> None:
    attempt, key = proxy.attempt()
    total = len(token_ids_of(reply_to([{"content": "hello"}])))
    backend.switches.weight_versions = [
        {"version": 7, "start": 0, "end": 4},
        {"version": 8, "start": 4, "end": total},
    ]
    await proxy.chat(key)
    await proxy.flush(attempt)
    record = store.record(attempt)
    assert [(r.version, r.start, r.end) for r in record.policy_versions] == [(7, 0, 4), (8, 4, total)]


@pytest.mark.parametrize(
    ("hidden", "extra_usage", "reason"),
    [
        ("token_ids", 0, "token_ids_missing"),
        ("", 1, "usage_mismatch"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_lacks_something_is_passed_on_and_marked_unusable(
    proxy: RunningProxy, store: FakeStore, backend: Backend, hidden: str, extra_usage: int, reason: str, stream: bool
) -> None:
    attempt, key = proxy.attempt()
    backend.switches.hide = frozenset({hidden})
    backend.switches.extra_usage_tokens = extra_usage
    headers = {"Authorization": f"Bearer {key}"}
    body = {"model": MODEL, "messages": MESSAGES, "stream": stream}
    async with proxy.http.post(f"{proxy.url}/chat/completions", json=body, headers=headers) as answer:
        assert answer.status == 200
        await answer.read()
    summary = await proxy.flush(attempt)
    record = store.record(attempt)
    assert not record.usable
    assert reason in record.unusable_reason.split(", ")
    assert (summary.call_count, summary.unusable_count) == (1, 1)


async def test_a_backend_without_token_ids_is_not_asked_for_them(
    proxy: RunningProxy, store: FakeStore, backend: Backend
) -> None:
    await proxy.register("plain", backend.url, returns_token_ids=False)
    await proxy.put_route(target("plain"))
    attempt, key = proxy.attempt()
    await proxy.chat(key)
    await proxy.flush(attempt)
    record = store.record(attempt)
    assert "return_token_ids" not in backend.received[-1].body
    assert record.unusable_reason == "backend_returns_no_token_ids"


async def test_a_route_without_a_policy_leaves_a_span_and_no_record(proxy: RunningProxy, store: FakeStore) -> None:
    await proxy.put_route(target("one", policy=""), model="judge")
    attempt, key = proxy.attempt()
    status, answer = await proxy.chat(key, model="judge")
    summary = await proxy.flush(attempt)
    [(span, record)] = store.spans(attempt)
    assert status == 200
    assert record is None
    assert {a.key for a in span.attributes} >= {"gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens"}
    assert (summary.unusable_count, summary.completion_token_count) == (0, answer["usage"]["completion_tokens"])


async def test_the_overrides_of_the_mode_are_applied_and_visible(
    proxy: RunningProxy, store: FakeStore, backend: Backend
) -> None:
    await proxy.put_route(target("one"), overrides={"validation": '{"temperature": 0, "top_p": 1}'})
    attempt, key = proxy.attempt(mode="validation")
    await proxy.chat(key, temperature=1.0)
    seen_validation = backend.received[-1].body
    _, train_key = proxy.attempt(mode="train")
    await proxy.chat(train_key, temperature=1.0)
    await proxy.flush(attempt)
    record = store.record(attempt)
    assert (seen_validation["temperature"], seen_validation["top_p"]) == (0, 1)
    assert backend.received[-1].body["temperature"] == 1.0
    assert record.temperature == 0
