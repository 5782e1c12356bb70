"""Rollouts under which runners die: they end as RUNNER_LOST, and their agent version is paused, until it is resumed."""

from __future__ import annotations

import asyncio
from typing import Any

import asyncpg
import pytest

from fulmen.errors import ArgumentInvalid, PermissionDenied
from fulmen.ids import parse_runner_name
from fulmen.store.v1 import failure_pb2, lease_pb2, rollout_pb2
from fulmen.store.v1 import project_service_pb2 as projects_pb
from fulmen_service_kit.security.tokens import Role
from tests.support.store.running import (
    LIMIT_S,
    Runner,
    StoreHandle,
    Stubs,
    create,
    get,
    queue_stats,
)

KILLER = "resources/agent.killer/versions/1"
GOOD = "resources/agent.good/versions/1"


@pytest.fixture
def store_settings() -> dict[str, Any]:
    """Returns leases that last: sessions expire when a test says so."""
    return {"lease_ttl_s": 3600.0}


async def die(store: StoreHandle, database_url: str, *runners: Runner) -> None:
    """Lets the sessions of runners expire, as they do when a runner is gone."""
    connection = await asyncpg.connect(database_url)
    for runner in runners:
        update = "update runner_session set lease_until = now() - interval '1 second' where id = $1"
        await connection.execute(update, parse_runner_name(runner.opened.runner))
    await connection.close()
    await store.parts.roles["lease-sweeper"].sweep_once()


async def rollouts(stubs: Stubs, count: int = 1, *, agent: str = KILLER, max_attempts: int = 9) -> list[str]:
    policy = rollout_pb2.RolloutPolicy(max_attempts=max_attempts)
    policy.retry_backoff.FromSeconds(0)
    return await create(stubs, count, agent=agent, policy=policy)


async def kinds(stubs: Stubs, name: str) -> list[str]:
    return [
        failure_pb2.FailureKind.Name(each.failure_kind).removeprefix("FAILURE_KIND_")
        for each in (await get(stubs, name)).attempts
    ]


async def kill(store: StoreHandle, stubs: Stubs, database_url: str, name: str) -> None:
    """Lets a rollout lose two runners that ran nothing else."""
    for _ in range(2):
        runner = await Runner(stubs).open()
        (taken,) = await runner.take(1)
        assert taken.rollout.name == name
        await die(store, database_url, runner)


async def test_a_rollout_whose_runner_died_twice_is_dead(store: StoreHandle, stubs: Stubs, database_url: str) -> None:
    (name,) = await rollouts(stubs)
    await kill(store, stubs, database_url, name)
    dead = await get(stubs, name)
    assert dead.state == rollout_pb2.ROLLOUT_STATE_FAILED
    assert dead.failure_kind == failure_pb2.FAILURE_KIND_RUNNER_LOST
    assert await kinds(stubs, name) == ["LEASE_LOST", "RUNNER_LOST"]
    assert "runner died" in dead.attempts[-1].failure_message


async def test_a_runner_that_drains_or_comes_back_is_not_a_lost_one(
    store: StoreHandle, stubs: Stubs, database_url: str
) -> None:
    (name,) = await rollouts(stubs)
    for _ in range(3):
        runner = await Runner(stubs).open()
        (taken,) = await runner.take(1)
        again = await Runner(stubs).open(session_id=runner.session_id, running=[taken.attempt])
        await again.release([taken])
        again.stream.cancel()
    runner = await Runner(stubs).open()
    await runner.take(1)
    await die(store, database_url, runner)
    assert (await kinds(stubs, name))[-1] == "LEASE_LOST"
    assert (await get(stubs, name)).failure_kind == failure_pb2.FAILURE_KIND_UNSPECIFIED


async def test_what_ran_beside_a_killer_survives_because_suspects_run_alone(
    store: StoreHandle, stubs: Stubs, database_url: str
) -> None:
    (killer,) = await rollouts(stubs)
    innocent = await rollouts(stubs, 2, agent=GOOD, max_attempts=3)
    for _ in range(2):
        runner = await Runner(stubs).open()
        assert len(await runner.take(3)) == 3
        await die(store, database_url, runner)
    # Nobody knows which of them it was.
    assert [await kinds(stubs, name) for name in (killer, *innocent)] == [["LEASE_LOST"] * 2] * 3

    (fresh,) = await rollouts(stubs, agent=GOOD)
    runner = await Runner(stubs).open()
    await runner.demand(4)
    order = []
    while len(order) < 4:
        given = (await runner.expect("assign")).assignments
        assert len(given) == (await queue_stats(stubs)).running_count == 1, "a suspect runs beside another rollout"
        order.append(given[0].rollout.name)
        if order[-1] == killer:
            await die(store, database_url, runner)
            runner = await Runner(stubs).open()
            await runner.demand(4)
        else:
            assert await runner.complete(list(given)) == [lease_pb2.COMPLETION_STATUS_APPLIED]
    assert sorted(order) == sorted([killer, *innocent, fresh])
    assert (await get(stubs, killer)).failure_kind == failure_pb2.FAILURE_KIND_RUNNER_LOST
    for name in (*innocent, fresh):
        assert (await get(stubs, name)).state == rollout_pb2.ROLLOUT_STATE_SUCCEEDED


async def until_paused(stubs: Stubs, *agents: str) -> None:
    async with asyncio.timeout(LIMIT_S):
        while [each.agent for each in (await queue_stats(stubs)).paused_agents] != list(agents):  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_a_version_whose_rollouts_lost_three_runners_is_paused_until_an_admin_resumes_it(
    store: StoreHandle, stubs: Stubs, database_url: str
) -> None:
    for _ in range(2):
        await kill(store, stubs, database_url, *await rollouts(stubs))
    assert not (await queue_stats(stubs)).paused_agents
    (third,) = await rollouts(stubs)
    await kill(store, stubs, database_url, third)
    await until_paused(stubs, KILLER)
    assert (await queue_stats(stubs)).paused_agents[0].rollouts[0] == third
    await store.parts.roles["project-follower"].follow_once()

    (waits,) = await rollouts(stubs)
    (other,) = await rollouts(stubs, agent=GOOD)
    runner = await Runner(stubs).open()
    await runner.demand(2)
    assert [each.rollout.name for each in (await runner.expect("assign")).assignments] == [other]
    assert (await get(stubs, waits)).state == rollout_pb2.ROLLOUT_STATE_QUEUED

    request = projects_pb.ResumeAgentRequest(project="projects/default", agent=KILLER)
    client = await store.stubs(role=Role.CLIENT)
    with pytest.raises(PermissionDenied):
        await client.projects.ResumeAgent(request)
    assert (await stubs.projects.ResumeAgent(request)).was_paused
    assert [each.rollout.name for each in (await runner.expect("assign")).assignments] == [waits]
    assert not (await stubs.projects.ResumeAgent(request)).was_paused
    with pytest.raises(ArgumentInvalid):
        await stubs.projects.ResumeAgent(projects_pb.ResumeAgentRequest(project="projects/default"))
