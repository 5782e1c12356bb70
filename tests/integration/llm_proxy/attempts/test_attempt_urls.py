"""Attribution by URL: agents whose key cannot be changed are given another base URL instead."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from fulmen.ids import DEFAULT_PROJECT, AttemptName, uuid7
from fulmen.store.v1 import attempt_pb2, lease_service_pb2, rollout_pb2
from fulmen_llm_proxy.apis.registry import BY_PATH
from fulmen_service_kit.security.tokens import Role
from tests.support.llm_proxy.backend import Backend
from tests.support.llm_proxy.fake_store import FakeStore
from tests.support.llm_proxy.harness import MODEL, RunningProxy, target

DEADLINE_S = 30


def url_of(proxy: RunningProxy, attempt: str) -> str:
    return f"{proxy.url.removesuffix('/v1')}/{attempt}/v1"


def key_of(proxy: RunningProxy, role: Role = Role.RUNNER, *, project: str | None = None) -> str:
    return proxy.signer.issue(role, subject="tests", ttl_s=600, project=project)


async def call(proxy: RunningProxy, attempt: str, key: str) -> tuple[int, dict[str, Any]]:
    """Makes one call with an attempt in the URL."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}]}
    headers = {"Authorization": f"Bearer {key}"}
    async with proxy.http.post(f"{url_of(proxy, attempt)}/chat/completions", json=body, headers=headers) as answer:
        return answer.status, await answer.json()


@pytest.mark.parametrize("role", [Role.RUNNER, Role.SERVICE, Role.CLIENT])
async def test_a_call_belongs_to_the_attempt_that_its_url_names(
    proxy: RunningProxy, store: FakeStore, role: Role
) -> None:
    attempt, _ = proxy.attempt()
    async with openai.AsyncOpenAI(base_url=url_of(proxy, attempt), api_key=key_of(proxy, role)) as agent:
        await agent.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x"}])
        assert [model.id async for model in agent.models.list()] == [MODEL]
    summary = await proxy.flush(attempt)
    assert (summary.call_count, summary.unusable_count) == (1, 0)
    record = store.record(attempt)
    assert record.usable


@pytest.mark.parametrize("path", [*BY_PATH, "/openai/deployments/nobodys/chat/completions"])
async def test_every_api_is_served_behind_an_attempt(proxy: RunningProxy, path: str) -> None:
    attempt, _ = proxy.attempt()
    message = {"role": "user", "content": "x"}
    body = {"model": "nobodys", "messages": [message], "prompt": "x", "input": "x", "max_tokens": 9}
    url = url_of(proxy, attempt).removesuffix("/v1") + path
    async with proxy.http.post(url, json=body, headers={"x-api-key": key_of(proxy)}) as answer:
        assert (answer.status, (await answer.json())["error"]["code"]) == (404, "route_not_found")


async def test_the_store_is_asked_before_the_first_call_only(proxy: RunningProxy, store: FakeStore) -> None:
    attempt, _ = proxy.attempt()
    key = key_of(proxy)
    await store.stop()
    assert (await call(proxy, attempt, key))[0] == 503
    await store.start()
    async with asyncio.timeout(DEADLINE_S):
        while (await call(proxy, attempt, key))[0] != 200:
            pass
    await store.stop()
    assert (await call(proxy, attempt, key))[0] == 200
    await store.start()


async def test_the_mode_is_that_of_the_rollout(proxy: RunningProxy, store: FakeStore, backend: Backend) -> None:
    attempt, _ = proxy.attempt()
    store.stands(attempt, lease_service_pb2.ATTEMPT_STATUS_LIVE, mode=rollout_pb2.ROLLOUT_MODE_VALIDATION)
    await proxy.put_route(target("one"), overrides={"validation": '{"temperature": 0}'})
    assert (await call(proxy, attempt, key_of(proxy)))[0] == 200
    assert backend.received[-1].body["temperature"] == 0


async def test_an_attempt_that_is_unknown_or_anothers_is_not_found(proxy: RunningProxy, store: FakeStore) -> None:
    unknown, theirs = (
        str(AttemptName(project=project, rollout_id=uuid7(), number=1)) for project in (DEFAULT_PROJECT, "projects/b")
    )
    store.stands(unknown, lease_service_pb2.ATTEMPT_STATUS_NOT_FOUND, project="", state=0, mode=0)
    store.stands(theirs, lease_service_pb2.ATTEMPT_STATUS_LIVE, project="projects/b")
    mine = key_of(proxy, Role.CLIENT, project=DEFAULT_PROJECT)
    for attempt in (
        unknown,
        theirs,
        "projects/default/rollouts/x/attempts/1",
        f"projects/default/rollouts/{uuid7()}/attempts/0",
    ):
        status, answer = await call(proxy, attempt, mine)
        assert (status, answer["error"]["code"]) == (404, "attempt_not_found")
    # Once a caller who may see it has called, it is known to the proxy; it stays hidden from who may not.
    assert (await call(proxy, theirs, key_of(proxy, Role.CLIENT, project="projects/b")))[0] == 200
    assert (await call(proxy, theirs, mine))[0] == 404


async def test_an_attempt_that_is_over_is_refused_at_its_first_and_at_later_calls(
    proxy: RunningProxy, store: FakeStore
) -> None:
    over, ending = proxy.attempt()[0], proxy.attempt()[0]
    state = attempt_pb2.ATTEMPT_STATE_SUCCEEDED
    store.stands(over, lease_service_pb2.ATTEMPT_STATUS_ENDED, state=state)
    key = key_of(proxy)
    assert (await call(proxy, over, key))[0] == 403
    assert (await call(proxy, ending, key))[0] == 200
    store.stands(ending, lease_service_pb2.ATTEMPT_STATUS_ENDED, state=state)
    async with asyncio.timeout(DEADLINE_S):
        while (answer := await call(proxy, ending, key))[0] == 200:
            pass
    assert (answer[0], answer[1]["error"]["code"]) == (403, "attempt_over")


async def test_an_attempt_key_reaches_its_own_attempt_only(proxy: RunningProxy) -> None:
    mine, key = proxy.attempt()
    other, _ = proxy.attempt()
    assert (await call(proxy, mine, key))[0] == 200
    status, answer = await call(proxy, other, key)
    assert (status, answer["error"]["code"]) == (403, "permission_denied")


async def test_a_key_is_needed_and_not_any_role_will_do(proxy: RunningProxy) -> None:
    attempt, _ = proxy.attempt()
    assert (await call(proxy, attempt, ""))[0] == 401
    assert (await call(proxy, attempt, key_of(proxy, Role.READER)))[0] == 403
    # A runner has calls of attempts to make, and none of its own.
    assert (await proxy.chat(key_of(proxy, Role.RUNNER)))[0] == 403
