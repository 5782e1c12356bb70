"""What an agent gets, and what is recorded of it."""

from __future__ import annotations

import openai

from fulmen.model_call import RESEND_COUNT_ATTRIBUTE
from tests.support.llm_proxy.backend import Backend
from tests.support.llm_proxy.fake_store import FakeStore
from tests.support.llm_proxy.harness import MODEL, RunningProxy, target

MESSAGES = [{"role": "user", "content": "hello wörld"}]


def client(proxy: RunningProxy, key: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=proxy.url, api_key=key, max_retries=0)


async def test_a_call_that_the_vendors_client_sends_again_says_so(proxy: RunningProxy, store: FakeStore) -> None:
    attempt, key = proxy.attempt()
    again = {"x-stainless-retry-count": "2"}
    async with client(proxy, key) as agent:
        await agent.chat.completions.create(model=MODEL, messages=MESSAGES, extra_headers=again)
    await proxy.flush(attempt)

    [(span, _)] = store.spans(attempt)
    assert [a.value.int_value for a in span.attributes if a.key == RESEND_COUNT_ATTRIBUTE] == [2]


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
