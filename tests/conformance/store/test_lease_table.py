"""One suite for every implementation of `LeaseTable`: PostgreSQL, and the memory of tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from uuid import UUID

import asyncpg
import pytest

from fulmen.ids import uuid7
from fulmen_store.domain.attempt_ends import AttemptEnds
from fulmen_store.domain.fair_queue import ReadyItem
from fulmen_store.domain.leases import AttemptEnd, AttemptReport, CompletionStatus, Grant, LeaseTable
from fulmen_store.domain.rollout_table import NewItem
from fulmen_store.domain.sessions import SessionOwner
from fulmen_store.domain.transitions import FailureKind, RetryPolicy, RolloutState
from fulmen_store.persistence.database import connect
from fulmen_store.persistence.leases import PgLeases, PgSessions
from fulmen_store.persistence.rollouts import PgRollouts
from tests.support.memory_lease_table import MemoryLeaseTable
from tests.support.postgres import shared_server

POLICY = RetryPolicy(max_attempts=2, retry_mask=RetryPolicy.mask_of(frozenset()), backoff_ms=0)
OWNER = SessionOwner(subject="tests", project="projects/default")
BEFORE_ALL = (-1000, UUID(int=0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A table under test, and what else its world needs."""

    table: LeaseTable
    add: Callable[[Sequence[ReadyItem]], Awaitable[None]]
    open_session: Callable[[], Awaitable[UUID]]
    end_session: Callable[[UUID], Awaitable[None]]
    limit_running: Callable[[int], Awaitable[None]]


@pytest.fixture(params=["memory", "postgres"])
async def subject(request: pytest.FixtureRequest) -> AsyncIterator[Subject]:
    """Yields each implementation."""
    if request.param == "memory":
        yield _memory()
        return
    server = shared_server()
    dsn = server.fresh_database()
    database = await connect(dsn, connections=3, start_limit_s=10)
    rollouts, sessions = PgRollouts(database), PgSessions(database)

    async def add(items: Sequence[ReadyItem]) -> None:
        await rollouts.create([_new(item) for item in items], [None] * len(items))

    async def open_session() -> UUID:
        session_id = uuid7()
        await sessions.open(session_id, owner=OWNER, host="h", info=b"", ttl_s=60)
        return session_id

    async def end_session(session_id: UUID) -> None:
        await sessions.end([session_id])

    async def limit_running(count: int) -> None:
        connection = await asyncpg.connect(dsn)
        await connection.execute("update project set max_running = $1", count)
        await connection.close()

    yield Subject(
        table=PgLeases(database),
        add=add,
        open_session=open_session,
        end_session=end_session,
        limit_running=limit_running,
    )
    await database.close()
    server.drop(dsn)


async def test_a_rollout_is_leased_to_one_session_only(subject: Subject) -> None:
    (item,) = await _waiting(subject, 1)
    sessions = [await subject.open_session() for _ in range(4)]
    grants = await asyncio.gather(*(subject.table.claim([(item.rollout_id, session)]) for session in sessions))
    (winner,) = [grant for granted in grants for grant in granted]
    assert winner.epoch == 1
    (held,) = await subject.table.held([item.rollout_id])
    assert (held.session_id, held.epoch, held.charged) == (winner.session_id, 1, 0)
    assert [lease.rollout_id for lease in await subject.table.held_by([winner.session_id])] == [item.rollout_id]


async def test_only_the_holder_of_the_latest_lease_ends_an_attempt(subject: Subject) -> None:
    grant = await _leased(subject)
    stranger = await subject.open_session()
    for session, epoch in ((stranger, 1), (grant.session_id, 2)):
        assert await subject.table.end([_end(grant.rollout_id, session, epoch, RolloutState.SUCCEEDED)]) == []
    (ended,) = await subject.table.end([_end(grant.rollout_id, grant.session_id, 1, RolloutState.SUCCEEDED)])
    assert ended.rollout_state is RolloutState.SUCCEEDED
    assert await subject.table.end([_end(grant.rollout_id, grant.session_id, 1, RolloutState.SUCCEEDED)]) == []
    (stored,) = await subject.table.ended([(grant.rollout_id, 1)])
    assert (stored.session_id, stored.kind) == (grant.session_id, FailureKind.NONE)


async def test_a_retried_rollout_waits_again_under_the_next_epoch(subject: Subject) -> None:
    grant = await _leased(subject)
    end = _end(grant.rollout_id, grant.session_id, 1, RolloutState.RETRY_WAIT, FailureKind.INFRA)
    assert await subject.table.end([end])
    ((item, delay_s),) = await subject.table.waiting(1, after=BEFORE_ALL, limit=10)
    assert (item.rollout_id, delay_s) == (grant.rollout_id, 0)
    (again,) = await subject.table.claim([(grant.rollout_id, grant.session_id)])
    assert again.epoch == 2
    (held,) = await subject.table.held([grant.rollout_id])
    assert held.charged == 1


async def test_waiting_items_come_in_order_page_by_page(subject: Subject) -> None:
    items = await _waiting(subject, 7, ranks=[3, -1, 0])
    listed: list[ReadyItem] = []
    after = BEFORE_ALL
    while page := await subject.table.waiting(1, after=after, limit=3):
        listed += [item for item, _ in page]
        after = (listed[-1].rank, listed[-1].rollout_id)
    assert listed == sorted(items, key=lambda item: (item.rank, item.rollout_id))


async def test_leases_of_ended_sessions_are_orphans(subject: Subject) -> None:
    grant = await _leased(subject)
    assert await subject.table.orphaned(10) == []
    await subject.end_session(grant.session_id)
    assert [lease.rollout_id for lease in await subject.table.orphaned(10)] == [grant.rollout_id]


async def test_a_claim_within_a_quota_takes_the_first_choices_and_says_what_room_is_left(subject: Subject) -> None:
    items = await _waiting(subject, 6)
    session = await subject.open_session()
    pairs = [(item.rollout_id, session) for item in items]
    await subject.limit_running(4)
    first = await subject.table.claim_within(1, pairs[:3])
    assert (first.tried, [grant.rollout_id for grant in first.grants], first.room) == (3, [p[0] for p in pairs[:3]], 1)
    # One that is leased already uses up the room for its try, not the quota.
    again = await subject.table.claim_within(1, [pairs[0], *pairs[3:]])
    assert (again.tried, again.grants, again.room) == (1, [], 1)
    last = await subject.table.claim_within(1, pairs[3:])
    assert (last.tried, [grant.rollout_id for grant in last.grants], last.room) == (1, [pairs[3][0]], 0)
    full = await subject.table.claim_within(1, pairs[4:])
    assert (full.tried, full.grants, full.room) == (0, [], 0)


async def test_claims_at_the_same_time_do_not_pass_a_quota_together(subject: Subject) -> None:
    items = await _waiting(subject, 8)
    await subject.limit_running(3)
    sessions = [await subject.open_session() for _ in range(4)]
    claims = await asyncio.gather(
        *(
            subject.table.claim_within(1, [(item.rollout_id, session) for item in items[start : start + 2]])
            for start, session in zip(range(0, 8, 2), sessions, strict=True)
        )
    )
    assert sum(len(claim.grants) for claim in claims) == 3


async def test_reports_are_applied_once_and_told_apart(subject: Subject) -> None:
    grant = await _leased(subject)
    ends = AttemptEnds(table=subject.table, requeued=lambda _items: None, finished=lambda _projects: None)
    role = asyncio.create_task(ends.committer.run())
    good = AttemptReport(
        rollout_id=grant.rollout_id, session_id=grant.session_id, epoch=1, kind=FailureKind.NONE, report=b"r"
    )
    other = AttemptReport(
        rollout_id=grant.rollout_id, session_id=grant.session_id, epoch=1, kind=FailureKind.INFRA, report=b""
    )
    statuses = [(await ends.report([report]))[0] for report in (good, good, other)]
    assert statuses == [CompletionStatus.APPLIED, CompletionStatus.DUPLICATE, CompletionStatus.LEASE_LOST]
    role.cancel()


def _memory() -> Subject:
    table = MemoryLeaseTable()

    async def add(items: Sequence[ReadyItem]) -> None:
        for item in items:
            table.add(item, POLICY)

    async def open_session() -> UUID:
        return uuid7()

    async def end_session(session_id: UUID) -> None:
        table.over.add(session_id)

    async def limit_running(count: int) -> None:
        table.max_running = count

    return Subject(
        table=table, add=add, open_session=open_session, end_session=end_session, limit_running=limit_running
    )


async def _waiting(subject: Subject, count: int, *, ranks: Sequence[int] = (0,)) -> list[ReadyItem]:
    items = [ReadyItem(rollout_id=uuid7(), project_id=1, rank=ranks[index % len(ranks)]) for index in range(count)]
    await subject.add(items)
    return items


async def _leased(subject: Subject) -> Grant:
    (item,) = await _waiting(subject, 1)
    (grant,) = await subject.table.claim([(item.rollout_id, await subject.open_session())])
    return grant


def _end(
    rollout_id: UUID,
    session_id: UUID,
    epoch: int,
    state: RolloutState,
    kind: FailureKind = FailureKind.NONE,
) -> AttemptEnd:
    report = AttemptReport(rollout_id=rollout_id, session_id=session_id, epoch=epoch, kind=kind)
    return AttemptEnd(report=report, cancel_requested=False, rollout_state=state, delay_s=0.0, charge=1)


def _new(item: ReadyItem) -> NewItem:
    return NewItem(
        rollout_id=item.rollout_id,
        project_id=item.project_id,
        run_id=None,
        group_key=None,
        group_size=1,
        rank=item.rank,
        not_before=None,
        policy=POLICY,
        labels=(),
        request=b"request",
    )
