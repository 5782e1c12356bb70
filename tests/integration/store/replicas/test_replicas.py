"""Several replicas on one database: they know one another, share the backlog, pass news on, and never double anything."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any
from uuid import UUID

import asyncpg
import pytest

from fulmen.errors import ArgumentInvalid, Draining, PermissionDenied
from fulmen.ids import runner_name, uuid7
from fulmen.rpc.channel import open_channel
from fulmen.store.v1 import (
    lease_pb2,
    peer_service_pb2,
    peer_service_pb2_grpc,
    resource_service_pb2,
    rollout_pb2,
)
from fulmen_service_kit.security.tokens import Role
from fulmen_store.database.database import Database, connect
from fulmen_store.events import QueueEvents
from fulmen_store.leases.table import PgLeaseTable
from fulmen_store.projects.names import ProjectNames
from fulmen_store.replicas.live_replicas import LiveReplicas, Replica
from fulmen_store.scheduling.dispatcher import Dispatcher
from fulmen_store.scheduling.runner_streams import Assigned, RunnerStream, RunnerStreams
from tests.support.store.resources import publish
from tests.support.store.running import (
    LIMIT_S,
    Runner,
    StoreHandle,
    cancel,
    create,
    get,
    meet,
    queue_stats,
    read_feed,
    replicas,
    report,
    running_store,
    until_state,
)

APPLIED = lease_pb2.COMPLETION_STATUS_APPLIED
LEASE_LOST = lease_pb2.COMPLETION_STATUS_LEASE_LOST
# Longer than any test may take: what happens in time was not found by a poll.
NEVER_POLLS: dict[str, Any] = {"poll_interval_s": 60.0, "lease_ttl_s": 180.0}
# Most are lost when nearly nothing is left and all want it, so that a longer backlog has a smaller share.
LOST_CLAIMS_LIMIT = 0.03
# A machine that stands still for a moment makes replicas meet at the end: the best of so many tries counts.
TRIES = 3


@pytest.fixture
async def pair(database_url: str) -> AsyncIterator[tuple[StoreHandle, StoreHandle]]:
    """Yields two replicas that find nothing of each other by polls."""
    async with replicas(database_url, 2, **NEVER_POLLS) as (one, other):
        yield one, other


async def addresses(connection: asyncpg.Connection) -> set[str]:
    """Returns the addresses of the replicas that the database lists."""
    return {row["address"] for row in await connection.fetch("select address from replica where lease_until > now()")}


async def test_a_replica_is_listed_while_it_lives_and_gone_when_it_has_drained(
    database_url: str, connection: asyncpg.Connection
) -> None:
    async with replicas(database_url, 3) as handles:
        assert await addresses(connection) == {handle.target for handle in handles}
        await handles[0].parts.drain()
        assert await addresses(connection) == {handle.target for handle in handles[1:]}
        # A renewal that comes late does not bring it back.
        await handles[0].parts.roles["membership-renewer"].renew_once()
        assert await addresses(connection) == {handle.target for handle in handles[1:]}


async def test_work_that_finds_no_runner_here_goes_at_once_to_one_elsewhere(
    pair: tuple[StoreHandle, StoreHandle],
) -> None:
    one, other = pair
    runner = await Runner(await other.stubs()).open()
    await runner.demand(40)
    await settled(other)
    stubs = await one.stubs()
    # One after the other: their ids are of both replicas' shares.
    for number in range(20):
        (name,) = await create(stubs)
        (assignment,) = (await runner.expect("assign")).assignments
        assert assignment.rollout.name == name, number


async def test_credit_takes_what_was_left_to_others_before_it_came(pair: tuple[StoreHandle, StoreHandle]) -> None:
    one, other = pair
    names = set(await create(await one.stubs(), 50))
    runner = await Runner(await other.stubs()).open()
    await runner.demand(50)
    # The news of a single new rollout makes the other replica look at all that waits.
    names |= set(await create(await one.stubs()))
    await runner.demand(1)
    taken: set[str] = set()
    while len(taken) < 51:
        taken |= {each.rollout.name for each in (await runner.expect("assign")).assignments}
    assert taken == names


async def test_lost_news_is_repaired_by_polls(database_url: str) -> None:
    async with replicas(database_url, 2, notify_peers=False, poll_interval_s=0.05, lease_ttl_s=3.0) as (one, other):
        here, there = await one.stubs(), await other.stubs()
        runner = await Runner(there).open()
        await runner.demand(20)
        await settled(other)
        names = await create(here, 20)
        assignments: list[lease_pb2.Assignment] = []
        while len(assignments) < 20:
            assignments += (await runner.expect("assign")).assignments
        await cancel(here, *names[:1])
        assert list((await runner.expect("cancel")).attempts) == [f"{names[0]}/attempts/1"]
        feed = asyncio.create_task(read_feed(here, groups=20))
        assert set(await runner.complete(assignments)) == {APPLIED}
        groups, _ = await feed
        assert sorted(group.rollouts[0].name for group in groups) == sorted(names)


async def test_a_cancelled_attempt_is_stopped_at_once_wherever_its_runner_sits(
    pair: tuple[StoreHandle, StoreHandle],
) -> None:
    one, other = pair
    here, there = await one.stubs(), await other.stubs()
    (name,) = await create(there)
    runner = await Runner(there).open()
    (assignment,) = await runner.take(1)
    await cancel(here, name)
    assert list((await runner.expect("cancel")).attempts) == [assignment.attempt]
    assert await runner.complete([assignment]) == [APPLIED]
    assert (await get(here, name)).state == rollout_pb2.ROLLOUT_STATE_CANCELLED


async def test_ends_at_one_replica_wake_the_feed_of_another(pair: tuple[StoreHandle, StoreHandle]) -> None:
    one, other = pair
    here, there = await one.stubs(), await other.stubs()
    runner = await Runner(there).open()
    cursor = ""
    for _ in range(5):
        feed = asyncio.create_task(read_feed(here, groups=1, cursor=cursor))
        (name,) = await create(there)
        await runner.complete(await runner.take(1))
        (group,), cursor = await feed
        assert [rollout.name for rollout in group.rollouts] == [name]


async def test_changed_resources_wake_the_watchers_of_another_replica(pair: tuple[StoreHandle, StoreHandle]) -> None:
    one, other = pair
    here, there = await one.stubs(), await other.stubs()
    watch = here.resources.WatchResources(resource_service_pb2.WatchResourcesRequest())
    async with asyncio.timeout(LIMIT_S):
        while not (await watch.read()).snapshot_complete:
            pass
        for number in range(3):
            await publish(there, f"news-{number}")
            while not (message := await watch.read()).resources:
                pass
            assert message.resources[0].name == f"resources/news-{number}/versions/1"
    watch.cancel()


async def test_false_and_malicious_news_change_nothing(pair: tuple[StoreHandle, StoreHandle]) -> None:
    one, _ = pair
    stubs = await one.stubs()
    await create(stubs)
    runner = await Runner(stubs).open()
    (assignment,) = await runner.take(1)
    async with open_channel(one.target, token=one.token(Role.SERVICE)) as channel:
        peers = peer_service_pb2_grpc.PeerServiceStub(channel)
        not_asked = peer_service_pb2.CancelHint(runner=runner_name(runner.session_id), attempt=assignment.attempt)
        await peers.Notify(
            peer_service_pb2.NotifyRequest(
                ready_projects=[-1, 0, 1, 2**31 - 1],
                finished_projects=list(range(1000)),
                resource_projects=[7, 7, -7],
                projects_changed=True,
                cancels=[not_asked] * 3,
            )
        )
        for wrong in (
            {"cancels": [{"runner": "x", "attempt": assignment.attempt}]},
            {"cancels": [{"runner": runner_name(runner.session_id), "attempt": "projects/default/rollouts/x"}]},
            {"cancels": [not_asked] * 1001},
            {"ready_projects": range(10_001)},
        ):
            with pytest.raises(ArgumentInvalid):
                await peers.Notify(peer_service_pb2.NotifyRequest(**wrong))
    # The answer comes after whatever the runner was told before it: it was not told to stop.
    assert await runner.complete([assignment]) == [APPLIED]
    assert not runner.inbox
    for role in (Role.CLIENT, Role.RUNNER):
        async with open_channel(one.target, token=one.token(role)) as channel:
            with pytest.raises(PermissionDenied):
                await peer_service_pb2_grpc.PeerServiceStub(channel).Notify(peer_service_pb2.NotifyRequest())


async def test_a_peer_that_is_gone_keeps_nobody_waiting(database_url: str, connection: asyncpg.Connection) -> None:
    async with replicas(database_url, 2, **NEVER_POLLS) as (one, other):
        # Nobody listens at the first, the second takes the connection and never answers.
        deaf = socket.create_server(("127.0.0.1", 0))
        ports = (1, deaf.getsockname()[1])
        for port in ports:
            await connection.execute(
                "insert into replica (id, address, runner_count, lease_until) "
                "values (gen_random_uuid(), $1, 1, now() + interval '1 hour')",
                f"127.0.0.1:{port}",
            )
        await meet(one, other)
        runner = await Runner(await other.stubs()).open()
        await runner.demand(3)
        await settled(other)
        for _ in range(3):
            await create(await one.stubs())
            assert (await runner.expect("assign")).assignments
        deaf.close()


async def test_a_runner_goes_on_at_another_replica_with_the_leases_that_it_has(
    pair: tuple[StoreHandle, StoreHandle],
) -> None:
    one, other = pair
    here, there = await one.stubs(), await other.stubs()
    names = await create(here, 3)
    runner = await Runner(here).open()
    kept, let_go, elsewhere = await runner.take(3)
    runner.stream.cancel()
    again = await Runner(there).open(session_id=runner.session_id, running=[kept.attempt, elsewhere.attempt])
    assert again.session_id == runner.session_id
    assert not again.opened.lost_attempts
    assert await again.complete([kept]) == [APPLIED]
    # A unary report reaches any replica too, also the one that it came from.
    assert await report(here, [elsewhere]) == [APPLIED]
    # What it did not list was given back, and costs no attempt.
    (repeated,) = await again.take(1)
    assert (repeated.rollout.name, repeated.epoch) == (let_go.rollout.name, 2)
    assert await again.complete([let_go]) == [LEASE_LOST]
    assert await again.complete([repeated]) == [APPLIED]
    for name in names:
        rollout = await get(there, name)
        assert rollout.state == rollout_pb2.ROLLOUT_STATE_SUCCEEDED
        assert sum(attempt.final for attempt in rollout.attempts) == 1


async def test_a_draining_replica_hands_its_runners_over_without_losing_a_lease(
    pair: tuple[StoreHandle, StoreHandle],
) -> None:
    one, other = pair
    here, there = await one.stubs(), await other.stubs()
    (name,) = await create(here)
    runner = await Runner(here).open()
    assignments = await runner.take(1)
    drain = asyncio.create_task(one.parts.drain())
    await runner.expect("drain")
    moved = await Runner(there).open(session_id=runner.session_id, running=[assignments[0].attempt])
    with pytest.raises(Draining):
        await runner.expect("nothing more")
    await drain
    assert not moved.opened.lost_attempts
    assert await moved.complete(assignments) == [APPLIED]
    (attempt,) = (await until_state(there, name, rollout_pb2.ROLLOUT_STATE_SUCCEEDED)).attempts
    assert attempt.final


async def test_what_a_replica_remembers_does_not_give_it_what_another_has_taken(database_url: str) -> None:
    # Without news and polls the first believes for ever that what it once knew still waits.
    async with (
        running_store(database_url, notify_peers=False, **NEVER_POLLS) as one,
        running_store(database_url, notify_peers=False) as other,
    ):
        here, there = await one.stubs(), await other.stubs()
        stale = await create(here, 5)
        taker = await Runner(there).open()
        assert {each.rollout.name for each in await taker.take(5)} == set(stale)
        late = await Runner(here).open()
        await late.demand(1)
        (fresh,) = await create(here)
        (assignment,) = (await late.expect("assign")).assignments
        assert assignment.rollout.name == fresh
        assert {name for name in stale if len((await get(here, name)).attempts) != 1} == set()


async def settled(handle: StoreHandle) -> None:
    """Waits until a replica's dispatcher has looked for the credit that it was given."""
    stubs = await handle.stubs()
    async with asyncio.timeout(LIMIT_S):
        while not (await queue_stats(stubs)).open_credit_count:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


class CountingMeter:
    """Counts what a dispatcher says."""

    def __init__(self) -> None:
        self.granted = 0
        self.lost = 0

    def dispatched(self, count: int, latency_s: float | None) -> None:
        """Notes granted claims."""
        self.granted += count

    def claims_lost(self, count: int) -> None:
        """Notes lost claims."""
        self.lost += count


class BareReplica:
    """What of a replica hands work out, on the real tables, and runners that end what they get at once."""

    def __init__(self, database: Database) -> None:
        self.meter, self.streams, self.known = CountingMeter(), RunnerStreams(), LiveReplicas(uuid7())
        self.taken: list[UUID] = []
        self.dispatcher = Dispatcher(
            table=PgLeaseTable(database, ProjectNames(database)),
            streams=self.streams,
            events=QueueEvents(),
            poll_interval_s=0.05,
            replicas=self.known,
            metrics=self.meter,
        )

    async def work(self, credit: int) -> None:
        """Connects a runner that asks for as much again as it got."""
        stream = RunnerStream(session_id=uuid7(), labels=frozenset(), projects=None)
        self.streams.attach(stream)
        self.dispatcher.add_credit(stream, credit)
        while True:
            await stream.outbox.wait()
            notice = stream.outbox.take()
            if isinstance(notice, Assigned):
                self.taken += [grant.rollout_id for grant in notice.grants]
                self.dispatcher.add_credit(stream, len(notice.grants))


@pytest.mark.parametrize(("count", "sizes"), [(2, (4, 4)), (3, (4, 4, 4)), (2, (8, 1))])
async def test_replicas_with_one_backlog_hand_out_everything_once_and_rarely_try_the_same(
    database_url: str, count: int, sizes: tuple[int, ...]
) -> None:
    lost: list[float] = []
    while not lost or (min(lost) > LOST_CLAIMS_LIMIT and len(lost) < TRIES):
        lost.append(await hand_out_one_backlog(database_url, count, sizes))
    assert min(lost) <= LOST_CLAIMS_LIMIT, lost


async def hand_out_one_backlog(database_url: str, count: int, sizes: tuple[int, ...]) -> float:
    """Lets replicas hand out a backlog, each rollout once; returns the share of claims that lost the race."""
    backlog = 5000
    async with running_store(database_url, poll_interval_s=60.0) as store:
        stubs = await store.stubs()
        for _ in range(backlog // 1000):
            await create(stubs, 1000)
    database = await connect(database_url, connections=6, start_limit_s=10)
    bare = [BareReplica(database) for _ in range(count)]
    for each in bare:
        each.known.update(
            [
                Replica(replica_id=other.known.own_id, address="none:1", runner_count=1)
                for other in bare
                if other is not each
            ]
        )
    tasks = [asyncio.create_task(each.dispatcher.run()) for each in bare]
    tasks += [
        asyncio.create_task(each.work(credit=8)) for each, size in zip(bare, sizes, strict=True) for _ in range(size)
    ]
    async with asyncio.timeout(3 * LIMIT_S):
        while sum(len(each.taken) for each in bare) < backlog:
            assert not [task for task in tasks if task.done()]
            await asyncio.sleep(0.02)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await database.close()
    times = Counter(rollout_id for each in bare for rollout_id in each.taken)
    assert len(times) == backlog
    assert set(times.values()) == {1}
    assert all(each.meter.granted for each in bare)
    lost = sum(each.meter.lost for each in bare)
    return lost / (backlog + lost)
