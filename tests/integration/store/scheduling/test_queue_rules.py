"""The queue's rules through a real store: quotas hold over replicas, statistics tell, durations are learned."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import asyncpg
import pytest

from fulmen.errors import QuotaExceeded
from fulmen.store.v1 import failure_pb2, lease_pb2, reward_pb2, rollout_pb2, runner_registry_service_pb2
from fulmen.store.v1 import rollout_service_pb2 as pb
from fulmen_cli.main import app
from tests.support.cli.command_runner import CliRunner
from tests.support.store.rollouts import renewing
from tests.support.store.running import (
    LIMIT_S,
    Runner,
    StoreHandle,
    Stubs,
    cancel,
    create,
    get,
    queue_stats,
    running_store,
    until_queued,
    until_state,
)

APPLIED = lease_pb2.COMPLETION_STATUS_APPLIED


@asynccontextmanager
async def store_with(database_url: str, lease_ttl_s: float = 6.0, **project: Any) -> AsyncIterator[StoreHandle]:
    """Runs a store whose default project has these columns from the start."""
    connection = await asyncpg.connect(database_url)
    for column, value in project.items():
        await connection.execute(f"update project set {column} = $1 where name = 'projects/default'", value)
    await connection.close()
    async with running_store(database_url, lease_ttl_s=lease_ttl_s) as handle:
        yield handle


async def test_more_than_the_quota_may_not_wait_and_the_answer_says_when_to_try_again(database_url: str) -> None:
    async with store_with(database_url, max_queued=5) as store:
        stubs = await store.stubs()
        await create(stubs, 3)
        with pytest.raises(QuotaExceeded) as refused:
            await create(stubs, 3, request_id="batch")
        assert refused.value.retry_after_s
        assert refused.value.metadata["max_queued"] == "5"
        assert (await queue_stats(stubs)).queued_count == 3
        runner = await Runner(stubs).open()
        await runner.take(2)
        # The same request, repeated as the answer asked: it is created once there is room.
        names = await created_in_the_end(stubs, 3, request_id="batch")
        assert await create(stubs, 3, request_id="batch") == names
        await until_queued(stubs, 4)


async def created_in_the_end(stubs: Stubs, count: int, *, request_id: str) -> list[str]:
    async with asyncio.timeout(LIMIT_S):
        while True:
            try:
                return await create(stubs, count, request_id=request_id)
            except QuotaExceeded as error:
                await asyncio.sleep(error.retry_after_s or 0)


async def test_a_project_never_runs_more_than_its_quota_whatever_the_replica(database_url: str) -> None:
    """Two replicas, each with credit for all: every rollout runs, never more than three at once."""
    async with (
        store_with(database_url, 60.0, max_running=3) as one,
        running_store(database_url, lease_ttl_s=60.0) as two,
    ):
        stubs = [await one.stubs(), await two.stubs()]
        count, running, most = 30, 0, 0
        runners = [await Runner(each).open() for each in (*stubs, *stubs)]
        for runner in runners:
            await runner.demand(count)
        for start in range(0, count, 10):
            await create(stubs[start // 10 % 2], 10)

        async def work(runner: Runner) -> None:
            nonlocal running, most
            while True:
                assignments = list((await runner.expect("assign")).assignments)
                running += len(assignments)
                most = max(most, running, (await queue_stats(stubs[0])).running_count)
                # Counted before it is reported: the store may hand out the next before the answer is here.
                running -= len(assignments)
                assert set(await runner.complete(assignments)) == {APPLIED}

        workers = [asyncio.create_task(work(runner)) for runner in runners]
        async with asyncio.timeout(LIMIT_S):
            while True:
                stats = await queue_stats(stubs[1])
                if not stats.queued_count and not stats.running_count:
                    break
                assert stats.running_count <= 3
                assert not [worker for worker in workers if worker.done()]
                await asyncio.sleep(0.01)
        assert most == 3
        for worker in workers:
            worker.cancel()


async def test_the_statistics_tell_priorities_rules_quotas_and_labels_that_no_runner_has(database_url: str) -> None:
    rules = pb.QueueRules(longest_first=False, ageing_interval={"seconds": 5})
    project = {"rules": rules.SerializeToString(), "weight": 250, "max_running": 7, "max_queued": 70}
    async with store_with(database_url, **project) as store:
        stubs = await store.stubs()
        runner = await Runner(stubs).open(labels={"zone": "a"})
        await create(stubs, 2, priority=4, required_labels={"gpu": "h200", "zone": "a"})
        await create(stubs, 1, priority=-3, required_labels={"gpu": "h200"})
        await create(stubs, 1, priority=4, required_labels={"zone": "a"})
        stats = await queue_stats(stubs)
        assert [(row.priority, row.queued_count) for row in stats.priorities] == [(4, 3), (-3, 1)]
        assert all(row.HasField("oldest_queued_age") for row in stats.priorities)
        assert (stats.weight, stats.max_running, stats.max_queued) == (250, 7, 70)
        assert (stats.rules.longest_first, stats.rules.affinity, stats.rules.hedging) == (False, True, False)
        assert stats.rules.ageing_interval.seconds == 5
        assert [(dict(row.labels), row.queued_count) for row in stats.unmatched] == [
            ({"gpu": "h200", "zone": "a"}, 2),
            ({"gpu": "h200"}, 1),
        ]
        command = ["queue", "--store-target", store.target, "--token", store.token()]
        shown = await asyncio.to_thread(CliRunner().invoke, app, command, env={"COLUMNS": "200", "TERM": "dumb"})
        assert shown.exit_code == 0, shown.output
        assert "weight 250, at most 7 running, at most 70 waiting, ageing one priority per 5.0 s" in shown.output
        assert "gpu=h200, zone=a" in shown.output
        assert len(await runner.take(1)) == 1


async def test_durations_of_successes_are_learned_by_task_type_and_survive_a_restart(database_url: str) -> None:
    async with running_store(database_url) as store:
        stubs = await store.stubs()
        await create(stubs, 3, task_type="sums")
        await create(stubs, 1, task_type="proofs")
        runner = await Runner(stubs).open()
        assignments = await runner.take(4)
        sums = [one for one in assignments if one.rollout.task_type == "sums"]
        proofs = [one for one in assignments if one.rollout.task_type == "proofs"]
        assert await runner.complete(sums) == [APPLIED] * 3
        assert await runner.complete(proofs, failure_kind=failure_pb2.FAILURE_KIND_AGENT_ERROR) == [APPLIED]
        async with asyncio.timeout(LIMIT_S):
            while not (stats := await queue_stats(stubs)).task_types:  # noqa: ASYNC110  # written by a role of its own
                await asyncio.sleep(0.05)
    async with running_store(database_url) as store:
        assert (await queue_stats(await store.stubs())).task_types == stats.task_types
    (learned,) = stats.task_types
    assert (learned.task_type, learned.sample_count) == ("sums", 3)
    assert 0 < learned.duration_p50.ToTimedelta().total_seconds() <= learned.duration_p95.ToTimedelta().total_seconds()
    assert learned.duration_p95.ToTimedelta().total_seconds() < LIMIT_S


@dataclass(frozen=True, slots=True)
class Hedged:
    """A rollout with two attempts: the first is late, the second was started beside it."""

    stubs: Stubs
    name: str
    late: Runner
    quick: Runner
    first: lease_pb2.Assignment
    second: lease_pb2.Assignment


@asynccontextmanager
async def hedged(database_url: str, **policy: int) -> AsyncIterator[Hedged]:
    """Runs a store that knows how long `sums` take and hedges one."""
    rules = pb.QueueRules(hedging=True)
    async with store_with(database_url, lease_ttl_s=2.0, rules=rules.SerializeToString()) as store:
        stubs = await store.stubs()
        async with renewing(await Runner(stubs).open()) as late, renewing(await Runner(stubs).open()) as quick:
            await create(stubs, 20, task_type="sums")
            assert await quick.complete(await quick.take(20)) == [APPLIED] * 20
            (name,) = await create(stubs, 1, task_type="sums", policy={"hedged": True, **policy})
            (first,) = await late.take(1)
            (second,) = await quick.take(1)
            yield Hedged(stubs, name, late, quick, first, second)


async def test_a_late_attempt_is_hedged_and_the_first_success_decides(database_url: str) -> None:
    async with hedged(database_url) as it:
        assert (it.first.rollout.name, it.first.epoch) == (it.second.rollout.name, it.second.epoch - 1) == (it.name, 1)
        assert it.second.attempt_key != it.first.attempt_key
        assert (await queue_stats(it.stubs)).running_count == 1
        running = (await get(it.stubs, it.name)).attempts
        assert [(each.name, each.runner.partition("/")[2]) for each in running] == [
            (it.first.attempt, it.late.session_id),
            (it.second.attempt, it.quick.session_id),
        ]
        listed = await it.stubs.runners.ListRunners(runner_registry_service_pb2.ListRunnersRequest())
        assert [each.running_count for each in listed.runners] == [1, 1]
        assert await it.quick.complete([it.second], output=b"42", rewards=[reward_pb2.Reward(value=0.75)]) == [APPLIED]
        assert list((await it.late.expect("lease_lost")).attempts) == [it.first.attempt]
        assert await it.late.complete([it.first]) == [lease_pb2.COMPLETION_STATUS_LEASE_LOST]
        rollout = await get(it.stubs, it.name)
    assert rollout.state == rollout_pb2.ROLLOUT_STATE_SUCCEEDED
    assert [(attempt.failure_kind, attempt.final) for attempt in rollout.attempts] == [
        (failure_pb2.FAILURE_KIND_SUPERSEDED, False),
        (failure_pb2.FAILURE_KIND_UNSPECIFIED, True),
    ]
    assert rollout.attempts[1].output == b"42"
    assert rollout.reward == 0.75
    taken = rollout.attempts[1].end_time.ToNanoseconds() - rollout.attempts[1].start_time.ToNanoseconds()
    assert rollout.duration.ToNanoseconds() == pytest.approx(taken, abs=1000)


async def test_a_hedge_whose_runner_dies_leaves_the_rollout_running(database_url: str) -> None:
    async with hedged(database_url, max_attempts=1) as it:
        it.quick.stream.cancel()
        async with asyncio.timeout(LIMIT_S):
            while (rollout := await get(it.stubs, it.name)).ended_attempt_count < 1:  # noqa: ASYNC110  # of the store
                await asyncio.sleep(0.02)
        assert rollout.state == rollout_pb2.ROLLOUT_STATE_RUNNING
        assert [attempt.name for attempt in rollout.attempts] == [it.first.attempt, it.second.attempt]
        assert rollout.attempts[1].failure_kind == failure_pb2.FAILURE_KIND_LEASE_LOST
        assert await it.late.complete([it.first]) == [APPLIED]
        assert (await get(it.stubs, it.name)).state == rollout_pb2.ROLLOUT_STATE_SUCCEEDED


async def test_a_cancel_ends_both_attempts_of_a_hedged_rollout(database_url: str) -> None:
    async with hedged(database_url) as it:
        assert await cancel(it.stubs, it.name) == (0, 1)
        assert list((await it.late.expect("cancel")).attempts) == [it.first.attempt]
        assert list((await it.quick.expect("cancel")).attempts) == [it.second.attempt]
        cancelled = failure_pb2.FAILURE_KIND_CANCELLED
        assert await it.late.complete([it.first], failure_kind=cancelled) == [APPLIED]
        assert list((await it.quick.expect("lease_lost")).attempts) == [it.second.attempt]
        rollout = await until_state(it.stubs, it.name, rollout_pb2.ROLLOUT_STATE_CANCELLED)
        assert len(rollout.attempts) == 2
