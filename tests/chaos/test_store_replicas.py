"""Three replicas and their PostgreSQL are killed under load: nothing acknowledged is lost, nothing counts twice.

A soak (FULMEN_TEST_SOAK=10) kills 24 times; FULMEN_TEST_SEED chooses others at other points.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from enum import StrEnum
from pathlib import Path

import pytest

from fulmen.store.v1 import attempt_pb2, rollout_pb2
from tests.support.postgres import PostgresServer
from tests.support.soak import SOAK, seed
from tests.support.store.load import FeedReader, Ledger, LoadRunner, Producer, StoreGroup, stored_spans
from tests.support.store.oracle import Shown, store_problems
from tests.support.store.replicas import ReplicaGroup

pytestmark = pytest.mark.timeout(1800)

REPLICAS = 3
KILLS = 24 if SOAK > 1 else 4
SEED = seed(20261121)
# So many attempts are ended and acknowledged between two kills: each comes in the middle of work.
ENDS_BETWEEN = 150
PROGRESS_LIMIT_S = 120.0
RUNNERS = 4


class Victim(StrEnum):
    """Who dies."""

    REPLICA = "replica"
    DATABASE = "database"
    BACKEND = "backend"


def victims(rng: random.Random) -> list[Victim]:
    """Chooses who dies, in order: everybody once, then mostly replicas."""
    chosen = [Victim.REPLICA, Victim.BACKEND, Victim.DATABASE, Victim.REPLICA]
    while len(chosen) < KILLS:
        chosen.append(rng.choices(list(Victim), weights=(3, 1, 1))[0])
    rng.shuffle(chosen)
    return chosen


@pytest.fixture
async def replicas(short_tmp_path: Path) -> AsyncIterator[ReplicaGroup]:
    """Yields a group of replicas on a PostgreSQL of their own."""
    server = PostgresServer(embedded=True)
    group = ReplicaGroup(
        server, short_tmp_path, count=REPLICAS, FULMEN_STORE_LEASE_TTL_S="3", FULMEN_STORE_DATABASE_CONNECTIONS="6"
    )
    try:
        await group.start()
        yield group
    finally:
        group.stop()
        server.stop()


@pytest.mark.long(short=True)
async def test_nothing_is_lost_or_doubled_while_replicas_and_postgresql_are_killed(replicas: ReplicaGroup) -> None:
    rng = random.Random(SEED)
    ledger, stop = Ledger(), asyncio.Event()
    async with StoreGroup.open(replicas.targets, replicas.token, random.Random(SEED)) as group:
        producers = [asyncio.create_task(Producer(group, ledger, stop).run()) for _ in range(3)]
        readers = [FeedReader(group, ledger) for _ in range(2)]
        runners = [LoadRunner(group, ledger) for _ in range(RUNNERS)]
        tasks = [asyncio.create_task(helper.run()) for helper in (*runners, *readers)]

        async def until(check: Callable[[], bool]) -> None:
            async with asyncio.timeout(PROGRESS_LIMIT_S):
                while not check():
                    for task in (*tasks, *producers):
                        if task.done():
                            task.result()
                    assert not replicas.dead()
                    await asyncio.sleep(0.05)

        for victim in victims(rng):
            before = len(ledger.ended)
            await until(lambda before=before: len(ledger.ended) >= before + ENDS_BETWEEN)
            await _kill(replicas, victim, rng)
            # A runner dies with whatever it holds, and another one begins in its place.
            dead = rng.randrange(RUNNERS)
            tasks[dead].cancel()
            await asyncio.gather(tasks[dead], return_exceptions=True)
            tasks[dead] = asyncio.create_task(LoadRunner(group, ledger).run())
        before = len(ledger.ended)
        await until(lambda: len(ledger.ended) >= before + ENDS_BETWEEN)
        stop.set()
        await asyncio.gather(*producers)
        await until(lambda: all(len(reader.read) >= len(ledger.created) for reader in readers))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        tasks.clear()
        whole = FeedReader(group, ledger)
        last = asyncio.create_task(whole.run())
        await until(lambda: len(whole.read) >= len(ledger.created))
        last.cancel()
        await asyncio.gather(last, return_exceptions=True)
        shown = Shown(
            feeds=[[one.group_id for one in reader.read] for reader in (*readers, whole)],
            rollouts={rollout.name: rollout for one in whole.read for rollout in one.rollouts},
            spans=await stored_spans(group, list(ledger.spans)),
        )
    problems = store_problems(ledger, shown)
    print(
        f"{KILLS} kills: {len(shown.rollouts)} rollouts, {len(ledger.ended)} acknowledged ends, "
        f"{sum(len(ids) for ids in ledger.spans.values())} acknowledged spans, {ledger.breaks} broken calls and streams, "
        f"{sum(len(rollout.attempts) > 1 for rollout in shown.rollouts.values())} rollouts with several attempts, "
        f"{len(problems)} problems"
    )
    assert not problems, "\n".join(problems[:20])
    assert ledger.breaks >= KILLS


async def _kill(replicas: ReplicaGroup, victim: Victim, rng: random.Random) -> None:
    match victim:
        case Victim.REPLICA:
            await replicas.kill_replica(rng.randrange(REPLICAS))
        case Victim.DATABASE:
            await replicas.kill_database()
        case Victim.BACKEND:
            replicas.kill_backend(rng)


def _sound() -> tuple[Ledger, Shown]:
    name = "projects/default/rollouts/a"
    ledger = Ledger(created={"g": (name,)}, ended={f"{name}/attempts/1"}, spans={f"{name}/attempts/1": {b"1"}})
    ledger.applied[f"{name}/attempts/1"] = 1
    attempt = attempt_pb2.Attempt(name=f"{name}/attempts/1", state=attempt_pb2.ATTEMPT_STATE_SUCCEEDED, final=True)
    rollout = rollout_pb2.Rollout(name=name, state=rollout_pb2.ROLLOUT_STATE_SUCCEEDED, attempts=[attempt])
    return ledger, Shown(feeds=[["g"], ["g"]], rollouts={name: rollout}, spans={f"{name}/attempts/1": [b"1"]})


def test_a_sound_store_has_no_problem() -> None:
    assert store_problems(*_sound()) == []


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (lambda ledger, shown: ledger.created.update(h=("projects/default/rollouts/b",)), "acknowledged and is lost"),
        (lambda ledger, shown: ledger.created.clear(), "never asked for"),
        (lambda ledger, shown: shown.feeds[0].append("g"), "2 times"),
        (lambda ledger, shown: shown.feeds[0].clear(), "never got g"),
        (
            lambda ledger, shown: shown.rollouts["projects/default/rollouts/a"].attempts.add(
                name="projects/default/rollouts/a/attempts/3"
            ),
            "not dense",
        ),
        (
            lambda ledger, shown: setattr(shown.rollouts["projects/default/rollouts/a"].attempts[0], "final", False),
            "are final",
        ),
        (lambda ledger, shown: ledger.ended.add("projects/default/rollouts/a/attempts/2"), "acknowledged end"),
        (lambda ledger, shown: ledger.applied.update(["projects/default/rollouts/a/attempts/1"]), "ended 2 times"),
        (lambda ledger, shown: ledger.spans["projects/default/rollouts/a/attempts/1"].add(b"2"), "a span of"),
        (lambda ledger, shown: shown.spans["projects/default/rollouts/a/attempts/1"].append(b"1"), "stored 2 times"),
    ],
)
def test_each_fault_of_a_store_is_found(harm: Callable[[Ledger, Shown], object], says: str) -> None:
    ledger, shown = _sound()
    harm(ledger, shown)
    problems = store_problems(ledger, shown)
    assert any(says in problem for problem in problems), problems
