"""Who shows many forged keys is told to wait; who shares the address and has a good one is not."""

from __future__ import annotations

import openai
import pytest

from fulmen.store.v1 import lease_service_pb2
from tests.support.llm_proxy.backend import Backend
from tests.support.llm_proxy.fake_store import FakeStore
from tests.support.llm_proxy.harness import MODEL, RunningProxy, running_proxy

ALLOWED = 5


async def refused(proxy: RunningProxy, key: str) -> tuple[int, str, int]:
    """Makes a call that is refused; returns its status, the error's code and the seconds to wait."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}]}
    headers = {"Authorization": f"Bearer {key}"}
    async with proxy.http.post(f"{proxy.url}/chat/completions", json=body, headers=headers) as answer:
        return answer.status, (await answer.json())["error"]["code"], int(answer.headers.get("retry-after", 0))


async def test_after_many_forged_keys_an_address_waits_and_good_keys_go_on(store: FakeStore, backend: Backend) -> None:
    async with running_proxy(store.target, backend_url=backend.url, auth_failures_per_minute=ALLOWED) as proxy:
        _, good = proxy.attempt()
        over, expired = proxy.attempt(ttl_s=-10)
        store.stands(over, lease_service_pb2.ATTEMPT_STATUS_ENDED)
        told = [await refused(proxy, f"forged-{number}") for number in range(ALLOWED + 1)]
        assert told[:ALLOWED] == [(401, "token_invalid", 0)] * ALLOWED
        assert told[ALLOWED][:2] == (429, "too_many_bad_keys")
        assert 1 <= told[ALLOWED][2] <= 60 / ALLOWED
        # A key that was good once, and none at all, are no guesses.
        assert (await refused(proxy, expired))[0] == 401
        assert (await refused(proxy, ""))[0] == 401
        assert (await proxy.chat(good))[0] == 200
    for problem, count in (("forged", ALLOWED + 1), ("expired", 1), ("missing", 1)):
        assert proxy.metric("keys_refused_total", problem=problem) == count


async def test_every_path_that_takes_a_key_counts(store: FakeStore) -> None:
    async with running_proxy(store.target, auth_failures_per_minute=1) as proxy:
        for url, status in ((f"{proxy.url}/models", 401), (f"{proxy.url}/models", 429)):
            async with proxy.http.get(url, headers={"x-api-key": "forged"}) as answer:
                assert answer.status == status
        async with openai.AsyncOpenAI(base_url=proxy.url, api_key="forged", max_retries=0) as agent:
            with pytest.raises(openai.RateLimitError):
                await agent.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x"}])
