"""An engine that answers with an older policy version than it is said to serve is found by its first answer."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.llm_proxy.backend import Backend
from tests.support.llm_proxy.fake_store import FakeStore
from tests.support.llm_proxy.harness import RunningProxy, running_proxy, target

DEADLINE_S = 30
EVERYTHING = {"version": 1, "start": 0, "end": 15}
"""The version of all tokens of the answer, `You said: hello`."""


async def until_found(proxy: RunningProxy, backend_id: str = "one") -> None:
    """Returns when the proxy holds a backend as stale."""
    async with asyncio.timeout(DEADLINE_S):
        while not (await proxy.health(backend_id)).stale_version:
            pass


@pytest.mark.parametrize("stream", [False, True])
async def test_its_tokens_are_recorded_under_the_version_that_it_proved_and_it_gets_no_other_call(
    store: FakeStore, stream: bool
) -> None:
    async with Backend() as stale, Backend() as right, running_proxy(store.target) as proxy:
        stale.switches.weight_versions = [EVERYTHING]
        right.switches.weight_versions = [EVERYTHING | {"version": 2}]
        await proxy.register("one", stale.url)
        await proxy.put_route(target("one", version=2))
        attempt, key = proxy.attempt()
        if stream:
            body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "stream": True}
            headers = {"Authorization": f"Bearer {key}"}
            async with proxy.http.post(f"{proxy.url}/chat/completions", json=body, headers=headers) as answer:
                await answer.read()
        else:
            await proxy.chat(key)
        await until_found(proxy)
        await proxy.flush(attempt)
        assert [part.version for part in store.record(attempt).policy_versions] == [1]
        assert store.record(attempt).usable
        assert proxy.metric("stale_answers_total", backend="one") == 1

        await proxy.register("two", right.url)
        await proxy.put_route(target("one", version=2), target("two", version=2))
        for _ in range(20):
            assert (await proxy.chat(proxy.attempt()[1]))[0] == 200
        assert (len(stale.received), len(right.received)) == (1, 20)


async def test_calls_wait_for_an_engine_that_is_alone_until_it_is_registered_again(
    proxy: RunningProxy, backend: Backend
) -> None:
    await proxy.put_route(target(version=2))
    backend.switches.weight_versions = [EVERYTHING]
    await proxy.chat(proxy.attempt()[1])
    await until_found(proxy)
    waiting = asyncio.create_task(proxy.chat(proxy.attempt()[1]))
    async with asyncio.timeout(DEADLINE_S):
        while (await proxy.health()).waiting_count != 1:
            pass
    backend.switches.weight_versions = [EVERYTHING | {"version": 2}]
    await proxy.register("one", backend.url)
    assert (await waiting)[0] == 200
    assert len(backend.received) == 2
    assert (await proxy.health()).stale_version == 0


@pytest.mark.parametrize(
    "reported",
    [
        [EVERYTHING],
        [EVERYTHING | {"version": 2}],
        [EVERYTHING | {"end": 4}, EVERYTHING | {"version": 2, "start": 4}],
        [],
    ],
    ids=["the same", "newer", "a swap", "none"],
)
async def test_a_version_that_is_not_older_and_one_that_is_not_told_are_no_proof(
    proxy: RunningProxy, backend: Backend, reported: list[dict[str, int]]
) -> None:
    backend.switches.weight_versions = reported
    for _ in range(3):
        assert (await proxy.chat(proxy.attempt()[1]))[0] == 200
    assert proxy.metric("stale_answers_total", backend="one") is None
    assert len(backend.received) == 3


async def test_an_older_version_that_is_served_on_purpose_is_no_proof(proxy: RunningProxy, backend: Backend) -> None:
    await proxy.put_route(target(version=2))
    backend.switches.weight_versions = [EVERYTHING]
    backend.switches.gate = asyncio.Event()
    call = asyncio.create_task(proxy.chat(proxy.attempt()[1]))
    await backend.arrived.acquire()
    await proxy.put_route(target(version=1))
    backend.switches.gate.set()
    assert (await call)[0] == 200
    assert proxy.metric("stale_answers_total", backend="one") is None
