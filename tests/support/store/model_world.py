"""The real world of the state machine test: two replicas, their database, and one project with everything in it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

import asyncpg

from fulmen.ids import parse_rollout_name
from fulmen.rpc.channel import FulmenChannel, open_channel
from fulmen.store.v1 import rollout_pb2
from fulmen_store.database.queries import SQL
from fulmen_store.rollouts.transitions import FINAL_STATES, FailureKind, RolloutState
from tests.support.store.model_client import StreamClient, Watcher
from tests.support.store.rollout_model import Lease, Modelled, RolloutModel
from tests.support.store.running import LIMIT_S, StoreHandle, Stubs, create_project, get

__all__ = ["World"]

ResultT = TypeVar("ResultT")

# How often the tables are looked at again while something is on its way from one replica to the other.
LOOK_S: Final = 0.01
SNAPSHOT: Final = """
select
    p.name || '/rollouts/' || r.id as name, i.session::text as holder, i.epoch, i.charged, i.cancel_requested,
    i.run_at > now() as waits, i.id is not null as is_live,
    e.state as end_state, e.failure_kind as end_kind, e.ends, a.attempts
from rollout r
join project p on p.id = r.project_id
left join item i on i.id = r.id
left join lateral (
    select max(q.state) as state, max(q.failure_kind) as failure_kind, count(*) as ends
    from rollout_end q where q.rollout_id = r.id
) e on true
cross join lateral (
    select array_agg((q.number, q.session::text, q.failure_kind, q.rollout_state) order by q.number) as attempts
    from attempt q where q.rollout_id = r.id
) a
where r.project_id = $1
"""
# The newest ended ones.
ATTEMPTS_SHOWN: Final = 16

MISCOUNTED = """
with kept as (
    select l.run_id, l.sort_priority, l.labels, l.task_type, l.agent, sum(l.live)::bigint as live
    from live_count l where l.project_id = $1
    group by l.run_id, l.sort_priority, l.labels, l.task_type, l.agent having sum(l.live) <> 0
), counted as (
    select i.run_id, i.sort_priority, i.labels, i.task_type, i.agent, count(*) as live from item i where i.project_id = $1
    group by i.run_id, i.sort_priority, i.labels, i.task_type, i.agent
)
(select * from kept except select * from counted) union all (select * from counted except select * from kept)
"""


class World:
    """One project over two replicas, and what its clients believe."""

    def __init__(self, loop: asyncio.Runner, replicas: list[StoreHandle], dsn: str, project: str) -> None:
        self.replicas = replicas
        self.project = project
        self.model = RolloutModel()
        self.streams: list[StreamClient] = []
        self.stubs: list[Stubs] = []
        self.watchers: list[Watcher] = []
        self.news = asyncio.Event()
        self.slow: dict[Lease, tuple[asyncpg.Connection, Any]] = {}
        self._loop = loop
        self._dsn = dsn
        self._channels: list[FulmenChannel] = []

    def run(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        """Does something, with a deadline; between two calls the replicas stand still."""
        return self._loop.run(asyncio.wait_for(work, LIMIT_S))

    async def start(self) -> None:
        """Makes the project and its clients."""
        self.database = await asyncpg.connect(self._dsn)
        await create_project(await self.replicas[0].stubs(), self.project)
        self.project_id = await self.database.fetchval("select id from project where name = $1", self.project)
        for replica in self.replicas:
            channel = open_channel(replica.target, token=replica.token(project=self.project))
            self._channels.append(channel)
            self.stubs.append(Stubs(channel))
        for stubs in self.stubs:
            self.watchers.append(Watcher(self.project, self.news))
            await self.watchers[-1].follow(stubs)

    async def close(self) -> None:
        """Leaves nothing behind that other projects could notice."""
        for connection, _ in self.slow.values():
            await connection.close()
        clients: list[StreamClient | Watcher] = [*self.streams, *self.watchers]
        for client in clients:
            await client.drop()
        for channel in self._channels:
            await channel.close()
        await self.database.execute("delete from item where project_id = $1", self.project_id)
        await self.database.close()

    # What is looked at after every step.

    async def settle(self) -> None:
        """Waits until everything that is under way has arrived.

        Raises:
            AssertionError: if the store and the model disagree, or if work and credit do not come together.
        """
        until = asyncio.get_running_loop().time() + LIMIT_S / 2
        while True:
            self.news.clear()
            self._hear()
            pending = self.differences(await self.database.fetch(SNAPSHOT, self.project_id)) or self._idle()
            if not pending:
                return
            assert asyncio.get_running_loop().time() < until, pending
            await self._look_again()

    async def _look_again(self) -> None:
        try:
            async with asyncio.timeout(LOOK_S):
                await self.news.wait()
        except TimeoutError:
            return

    def _hear(self) -> None:
        for stream in self.streams:
            while stream.told:
                assert stream.credit > 0, f"{stream.session} was given more than it asked for"
                stream.credit -= 1
                self.model.leased(stream.told.pop(0))
            stream.check()

    def _idle(self) -> str:
        """Says which work waits although somebody has credit for it."""
        waiting = [rollout.name for rollout in self.model.rollouts.values() if rollout.is_ready]
        open_credit = sum(stream.credit for stream in self.streams if not stream.closed)
        return f"{waiting} wait with a credit of {open_credit}" if waiting and open_credit else ""

    def differences(self, rows: list[asyncpg.Record]) -> str:
        """Compares the tables with the model; returns what may be a message that is still under way.

        Raises:
            AssertionError: if nothing that is under way explains what is different.
        """
        pending = ""
        assert {row["name"] for row in rows} == self.model.rollouts.keys()
        for row in rows:
            rollout = self.model.rollouts[row["name"]]
            self._adopt_given_back(rollout, row)
            if row["holder"] is not None and not rollout.holder:
                assert rollout.is_ready, (row, rollout)
                assert row["epoch"] == rollout.epoch + 1, (row, rollout)
                pending = f"{row} was told to nobody"
                continue
            self._compare(rollout, row)
        return pending

    def _adopt_given_back(self, rollout: Modelled, row: asyncpg.Record) -> None:
        """Takes in leases that a replica gave back because the runner was gone before it was told."""
        for number, session, kind, state in (row["attempts"] or [])[len(rollout.attempts) :]:
            assert kind == FailureKind.RELEASED, (row, rollout)
            assert state == RolloutState.RETRY_WAIT, (row, rollout)
            assert session in {stream.session for stream in self.streams if stream.closed}, (row, rollout)
            self.model.leased(Lease(rollout.name, session, number))
            rollout.end(FailureKind.RELEASED, None)

    def _compare(self, rollout: Modelled, row: asyncpg.Record) -> None:
        expected = [(each.number, each.session, each.kind, each.next_state) for each in rollout.attempts]
        assert [tuple(each) for each in row["attempts"] or []] == expected, (row, rollout)
        assert [number for number, *_ in expected] == [*range(1, len(expected) + 1)], rollout
        if not row["is_live"]:
            assert row["ends"] == 1, (row, rollout)
            assert (row["end_state"], row["end_kind"]) == (rollout.state, rollout.failure_kind), (row, rollout)
            return
        assert row["ends"] == 0, (row, rollout)
        if row["holder"] is not None:
            state = RolloutState.RUNNING
        elif row["waits"] and row["epoch"]:
            state = RolloutState.RETRY_WAIT
        else:
            state = RolloutState.QUEUED
        assert (state, row["holder"] or "", row["epoch"]) == (rollout.state, rollout.holder, rollout.epoch), rollout
        assert row["waits"] == (rollout.delayed or state is RolloutState.RETRY_WAIT) or state is RolloutState.RUNNING
        assert (row["charged"], row["cancel_requested"]) == (rollout.charged, rollout.cancel_asked), (row, rollout)
        assert rollout.charged <= rollout.request.policy.max_attempts

    def check_watchers(self) -> None:
        """Compares what was read of the feed with what has finished, and the readers with each other."""
        finished = self.model.finished_groups()
        first, second = sorted((watcher.read for watcher in self.watchers), key=len)
        assert second[: len(first)] == first, "two readers got the groups in different orders"
        assert len(set(second)) == len(second), f"a group was announced twice: {second}"
        assert set(second) <= finished, f"announced without having finished: {set(second) - finished}"

    async def compare_counts(self) -> None:
        """Compares the kept counts of the project with its rows."""
        problems = await self.database.fetch(MISCOUNTED, self.project_id)
        assert problems == []

    async def read_to_the_end(self) -> None:
        """Waits until the readers have everything, and reads it again at each replica.

        Raises:
            AssertionError: if something was lost, doubled or put in another order.
        """
        finished = self.model.finished_groups()
        again = [Watcher(self.project, self.news) for _ in self.stubs]
        # One of them from the beginning, one from a cursor of long ago.
        again[0].groups = self.watchers[0].groups[: len(self.watchers[0].groups) // 2]
        self.watchers += again
        for watcher, stubs in zip(again, self.stubs, strict=True):
            await watcher.follow(stubs)
        until = asyncio.get_running_loop().time() + LIMIT_S / 2
        while any(len(watcher.groups) < len(finished) for watcher in self.watchers):
            self.news.clear()
            read = [watcher.read for watcher in self.watchers]
            assert asyncio.get_running_loop().time() < until, f"{finished} have finished, the readers got {read}"
            await self._look_again()
        for watcher in self.watchers:
            assert watcher.read == self.watchers[-1].read, "a reader got other groups, or in another order"
            assert set(watcher.read) == finished
            for rollout in (rollout for group in watcher.groups for rollout in group.rollouts):
                self._compare_shown(rollout)

    async def compare_shown(self, stubs: Stubs, name: str) -> None:
        """Compares what a replica shows of a rollout with the model."""
        self._compare_shown(await get(stubs, name))

    def _compare_shown(self, shown: rollout_pb2.Rollout) -> None:
        rollout = self.model.rollouts[shown.name]
        told = (int(shown.state), int(shown.failure_kind))
        assert told == (rollout.state.value, rollout.failure_kind.value), (shown, rollout)
        ended = [(f"{rollout.name}/attempts/{each.number}", each.kind) for each in rollout.attempts[-ATTEMPTS_SHOWN:]]
        assert shown.ended_attempt_count == len(rollout.attempts), (shown, rollout)
        attempts = [(each.name, each.failure_kind) for each in shown.attempts]
        assert attempts == [*ended, *([(rollout.lease.attempt, 0)] if rollout.holder else [])], (shown, rollout)
        decided = rollout.attempts[-1:] if rollout.attempts and rollout.attempts[-1].next_state in FINAL_STATES else []
        assert [each.final for each in shown.attempts] == [False] * (len(attempts) - len(decided)) + [True] * len(
            decided
        )

    # What other processes do to the tables.

    async def alter(self, statement: str, *arguments: object) -> None:
        """Changes the tables as time does."""
        await self.database.execute(statement, *arguments)

    async def begin_slowly(self, lease: Lease) -> None:
        """Ends an attempt well, as another replica does that stops between its statement and its commit."""
        connection = await asyncpg.connect(self._dsn)
        transaction = connection.transaction()
        await transaction.start()
        rollout = self.model.rollouts[lease.name]
        state = RolloutState.CANCELLED if rollout.cancel_asked else RolloutState.SUCCEEDED
        row = (
            parse_rollout_name(lease.name).rollout_id,
            lease.session,
            lease.epoch,
            rollout.cancel_asked,
            2,
            0,
            state,
            0.0,
            1,
            b"",
            self.project_id,
            0,
            None,
            None,
            None,
        )
        ended = await connection.fetch(SQL["end_attempts"], *([value] for value in row), 3)
        assert len(ended) == 1
        self.slow[lease] = connection, transaction

    async def finish_slowly(self, lease: Lease, *, commit: bool) -> None:
        """Lets the other replica commit, or die before it did."""
        connection, transaction = self.slow.pop(lease)
        if commit:
            await transaction.commit()
            self.model.rollouts[lease.name].end(FailureKind.NONE, None)
        await connection.close()
