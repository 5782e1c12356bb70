"""Attempt keys as the store makes them, against the leases of a real store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from fulmen.ids import parse_attempt_name
from fulmen.store.v1 import failure_pb2, project_service_pb2, rollout_pb2, rollout_service_pb2
from fulmen_service_kit.security.tokens import Role
from tests.support.llm_proxy.backend import Backend
from tests.support.llm_proxy.harness import RunningProxy, running_proxy
from tests.support.llm_proxy.waits import until_refused
from tests.support.store.running import SIGNING_KEY, Runner, StoreHandle, Stubs, create, create_project, running_store

DEADLINE_S = 60
AGAIN = rollout_pb2.RolloutPolicy(max_attempts=3, retry_on=[failure_pb2.FAILURE_KIND_INFRA])


@pytest.fixture
async def real_store(database_url: str) -> AsyncIterator[StoreHandle]:
    """Yields a store on PostgreSQL."""
    async with running_store(database_url) as handle:
        yield handle


@pytest.fixture
async def stubs(real_store: StoreHandle) -> Stubs:
    """Returns an administrator's stubs."""
    return await real_store.stubs()


@pytest.fixture
async def proxy(real_store: StoreHandle, backend: Backend) -> AsyncIterator[RunningProxy]:
    """Yields a proxy of that store."""
    async with (
        asyncio.timeout(DEADLINE_S),
        running_proxy(real_store.target, backend_url=backend.url, signing_key=SIGNING_KEY) as running,
    ):
        yield running


async def test_a_key_lives_and_ends_with_its_attempt(proxy: RunningProxy, stubs: Stubs) -> None:
    await create(stubs)
    runner = await Runner(stubs).open()
    (held,) = await runner.take(1)
    assert [(await proxy.chat(held.attempt_key))[0] for _ in range(3)] == [200, 200, 200]
    await runner.complete([held])
    status, answer = await until_refused(proxy, held.attempt_key)
    assert (status, answer["error"]["message"]) == (403, "The attempt has ended; its key is no longer valid.")


async def test_the_key_of_the_first_attempt_is_no_good_while_the_second_runs(proxy: RunningProxy, stubs: Stubs) -> None:
    await create(stubs, policy=AGAIN)
    runner = await Runner(stubs).open()
    (first,) = await runner.take(1)
    await runner.complete([first], failure_kind=failure_pb2.FAILURE_KIND_INFRA)
    (second,) = await runner.take(1)
    status, answer = await until_refused(proxy, first.attempt_key)
    assert (status, answer["error"]["code"]) == (403, "attempt_over")
    assert "A newer attempt" in answer["error"]["message"]
    assert (await proxy.chat(second.attempt_key))[0] == 200


async def test_a_cancelled_rollouts_call_in_flight_is_ended(
    proxy: RunningProxy, stubs: Stubs, backend: Backend
) -> None:
    (name,) = await create(stubs)
    runner = await Runner(stubs).open()
    (held,) = await runner.take(1)
    backend.switches.gate = asyncio.Event()
    call = asyncio.create_task(proxy.chat(held.attempt_key))
    await backend.arrived.acquire()
    await stubs.rollouts.CancelRollouts(rollout_service_pb2.CancelRolloutsRequest(names=[name]))
    status, answer = await call
    await backend.aborted.acquire()
    assert (status, answer["error"]["message"]) == (403, "The rollout was cancelled; the attempt should stop.")


@pytest.mark.long(short=True)
async def test_the_key_of_a_runner_that_is_gone_ends_with_its_lease(proxy: RunningProxy, stubs: Stubs) -> None:
    await create(stubs, policy=AGAIN)
    runner = await Runner(stubs).open()
    (held,) = await runner.take(1)
    assert (await proxy.chat(held.attempt_key))[0] == 200
    runner.stream.cancel()
    assert (await until_refused(proxy, held.attempt_key))[0] == 403


async def test_a_key_that_names_another_project_does_not_reach_the_attempt(
    proxy: RunningProxy, stubs: Stubs, real_store: StoreHandle
) -> None:
    await create_project(stubs, "projects/b")
    await create(stubs)
    (held,) = await (await Runner(stubs).open()).take(1)
    key = proxy.signer.attempt_key(
        replace(parse_attempt_name(held.attempt), project="projects/b"),
        project="projects/b",
        lease_id="l",
        epoch=1,
        mode="train",
        ttl_s=60,
    )
    assert (await until_refused(proxy, key))[0] == 403
    assert (await proxy.chat(held.attempt_key))[0] == 200


async def test_a_token_that_is_revoked_at_the_store_is_refused_at_the_proxy(proxy: RunningProxy, stubs: Stubs) -> None:
    issued = await stubs.projects.IssueToken(
        project_service_pb2.IssueTokenRequest(
            project="projects/default", role=project_service_pb2.TOKEN_ROLE_CLIENT, subject="ann"
        )
    )
    assert (await proxy.chat(issued.token))[0] == 200
    await stubs.projects.RevokeToken(project_service_pb2.RevokeTokenRequest(token_id=issued.token_id))
    status, answer = await until_refused(proxy, issued.token)
    assert (status, answer["error"]["message"]) == (401, "The token was revoked.")
    async with proxy.http.get(f"{proxy.url}/models", headers={"x-api-key": issued.token}) as models:
        assert models.status == 401
    assert (await proxy.chat(proxy.signer.issue(Role.CLIENT, subject="ann", ttl_s=60)))[0] == 200
