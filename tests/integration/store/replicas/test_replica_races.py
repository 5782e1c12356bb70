"""Replicas race: runners that come back from the dead, sessions that end under them, cancels from everywhere."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress

import asyncpg

from fulmen.errors import DeadlineExceeded, Unavailable
from fulmen.store.v1 import rollout_service_pb2 as pb
from tests.support.store.load import FeedReader, Ledger, LoadRunner, Producer, StoreGroup, Zombie
from tests.support.store.oracle import Shown, store_problems
from tests.support.store.running import replicas

REPLICAS = 3
ENOUGH_ENDS = 400
LIMIT_S = 90.0
HARM_AT_LEAST_EVERY_S = 1.0
END_SESSIONS = """
update runner_session set lease_until = now() - interval '1 second'
where ended_at is null and id = any (
    select s.id from runner_session s where s.ended_at is null order by random() limit $1
)
"""


async def test_everything_ends_once_whatever_races(database_url: str) -> None:
    rng = random.Random(1)
    ledger, stop = Ledger(), asyncio.Event()
    async with AsyncExitStack() as stack:
        handles = await stack.enter_async_context(replicas(database_url, REPLICAS, lease_ttl_s=5.0))
        group = await stack.enter_async_context(
            StoreGroup.open([handle.target for handle in handles], handles[0].token(), random.Random(1))
        )
        readers = [FeedReader(group, ledger) for _ in range(2)]
        harm = [
            asyncio.create_task(_again_and_again(work, ledger, rng))
            for work in (lambda: _end_sessions(database_url, 2), lambda: _cancel(group, ledger, rng))
        ]
        zombies = [asyncio.create_task(Zombie(group, ledger, rng).run()) for _ in range(3)]
        tasks = [asyncio.create_task(each.run()) for each in (LoadRunner(group, ledger), *readers)]
        producer = asyncio.create_task(Producer(group, ledger, stop).run())
        async with asyncio.timeout(LIMIT_S):
            await _until(lambda: len(ledger.ended) >= ENOUGH_ENDS, [*tasks, *zombies, *harm, producer])
            stop.set()
            await producer
            await _end(*harm, *zombies)
            await _end_sessions(database_url, None)
            await _until(lambda: all(len(reader.read) >= len(ledger.created) for reader in readers), tasks)
        whole = FeedReader(group, ledger)
        tasks.append(asyncio.create_task(whole.run()))
        async with asyncio.timeout(LIMIT_S):
            await _until(lambda: len(whole.read) >= len(ledger.created), tasks)
        await _end(*tasks)
    shown = Shown(
        feeds=[[one.group_id for one in reader.read] for reader in (*readers, whole)],
        rollouts={rollout.name: rollout for one in whole.read for rollout in one.rollouts},
        # Spans are the chaos test's part.
        spans={attempt: list(ids) for attempt, ids in ledger.spans.items()},
    )
    problems = store_problems(ledger, shown)
    assert not problems, "\n".join(problems[:20])
    # The race was one: attempts were lost and repeated, and rollouts cancelled.
    assert any(len(rollout.attempts) > 1 for rollout in shown.rollouts.values())
    assert ledger.cancels


async def _until(check: Callable[[], bool], tasks: list[asyncio.Task[None]]) -> None:
    while not check():
        for task in tasks:
            if task.done():
                task.result()
        await asyncio.sleep(0.02)


async def _end(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _again_and_again(work: Callable[[], Awaitable[None]], ledger: Ledger, rng: random.Random) -> None:
    """Harms after a few more ends, however long they take, and where nothing ends."""
    while True:
        await work()
        enough = len(ledger.ended) + rng.randint(0, 20)
        with suppress(TimeoutError):
            async with asyncio.timeout(HARM_AT_LEAST_EVERY_S):
                await _until(lambda enough=enough: len(ledger.ended) >= enough, [])


async def _end_sessions(dsn: str, count: int | None) -> None:
    connection = await asyncpg.connect(dsn)
    try:
        await connection.execute(END_SESSIONS, count)
    finally:
        await connection.close()


async def _cancel(group: StoreGroup, ledger: Ledger, rng: random.Random) -> None:
    names = [name for members in list(ledger.created.values())[-20:] for name in members]
    chosen = rng.sample(names, min(len(names), 3))
    if not chosen:
        return
    ledger.cancels |= set(chosen)
    try:
        await group.any().rollouts.CancelRollouts(pb.CancelRolloutsRequest(names=chosen))
    except (Unavailable, DeadlineExceeded):
        ledger.breaks += 1
