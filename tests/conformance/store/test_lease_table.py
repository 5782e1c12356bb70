"""One suite for every implementation of `LeaseTable`: PostgreSQL, and the memory of tests."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from uuid import UUID

import asyncpg
import pytest

from fulmen.ids import uuid7
from fulmen_store.database.database import connect
from fulmen_store.events import QueueEvents
from fulmen_store.leases.attempt_ends import AttemptEnds
from fulmen_store.leases.leases import AttemptEnd, AttemptReport, CompletionStatus, Grant, LeaseTable, SessionOwner
from fulmen_store.leases.table import PgLeaseTable, SessionTable
from fulmen_store.projects.names import ProjectNames
from fulmen_store.rollouts.requests import NewRollout
from fulmen_store.rollouts.table import RolloutTable
from fulmen_store.rollouts.transitions import FailureKind, RetryPolicy, RolloutState
from fulmen_store.scheduling.fair_queue import ReadyItem
from tests.support.postgres import shared_server
from tests.support.store.memory_lease_table import REQUEST, MemoryLeaseTable

POLICY = RetryPolicy(max_attempts=2, retry_mask=RetryPolicy.mask_of(frozenset()), backoff_ms=0)
OWNER = SessionOwner(subject="tests", project="projects/default")
BEFORE_ALL = (-1000, UUID(int=0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A table under test, and what else its world needs."""

    table: LeaseTable
    add: Callable[[Sequence[ReadyItem], bool], Awaitable[None]]
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
    projects = ProjectNames(database)
    rollouts, sessions = RolloutTable(database, projects), SessionTable(database)

    async def add(items: Sequence[ReadyItem], hedged: bool) -> None:
        await rollouts.create([_new(item, hedged) for item in items])

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
        table=PgLeaseTable(database, projects),
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
    for wrong in (replace(grant, session_id=stranger), replace(grant, epoch=2)):
        assert await subject.table.end([_end(wrong, RolloutState.SUCCEEDED)]) == []
    (ended,) = await subject.table.end([_end(grant, RolloutState.SUCCEEDED)])
    assert ended.rollout_state is RolloutState.SUCCEEDED
    assert await subject.table.end([_end(grant, RolloutState.SUCCEEDED)]) == []
    (stored,) = await subject.table.ended([(grant.rollout_id, 1)])
    assert (stored.session_id, stored.kind) == (grant.session_id, FailureKind.NONE)


async def test_a_retried_rollout_waits_again_under_the_next_epoch(subject: Subject) -> None:
    grant = await _leased(subject)
    assert await subject.table.end([_end(grant, RolloutState.RETRY_WAIT, FailureKind.INFRA)])
    ((item, delay_s),) = await subject.table.waiting(1, after=BEFORE_ALL, limit=10)
    assert (item.rollout_id, delay_s) == (grant.rollout_id, 0)
    (again,) = await subject.table.claim([(grant.rollout_id, grant.session_id)])
    assert again.epoch == 2
    (held,) = await subject.table.held([grant.rollout_id])
    assert held.charged == 1


async def test_waiting_items_come_in_order_page_by_page(subject: Subject) -> None:
    items = await _waiting(subject, 7, priorities=[3, -1, 0])
    listed: list[ReadyItem] = []
    after = BEFORE_ALL
    while page := await subject.table.waiting(1, after=after, limit=3):
        listed += [item for item, _ in page]
        after = _place(listed[-1])
    assert listed == sorted(items, key=_place)


async def test_the_oldest_of_each_rank_are_found_behind_any_backlog(subject: Subject) -> None:
    items = await _waiting(subject, 9, priorities=[-2, 0, 7])
    in_order = sorted(items, key=_place)
    found = [item for item, _ in await subject.table.oldest(1, per_priority=2)]
    assert sorted(found, key=_place) == [item for start in (0, 3, 6) for item in in_order[start : start + 2]]
    assert await subject.table.oldest(2, per_priority=2) == []


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


async def test_a_second_lease_is_given_to_another_session_only_and_only_once(subject: Subject) -> None:
    first = await _leased(subject, hedged=True)
    (plain,) = await _waiting(subject, 1)
    other, third = await subject.open_session(), await subject.open_session()
    await subject.table.claim([(plain.rollout_id, other)])
    assert [one.item.rollout_id for one in await subject.table.hedgeable([1], 10)] == [first.rollout_id]
    assert await subject.table.claim_hedges([(first.rollout_id, first.session_id, 0.0)]) == []
    assert await subject.table.claim_hedges([(first.rollout_id, other, 3600.0)]) == []
    assert await subject.table.claim_hedges([(plain.rollout_id, third, 0.0)]) == []
    (hedge,) = await subject.table.claim_hedges([(first.rollout_id, other, 0.0)])
    assert (hedge.session_id, hedge.epoch) == (other, 2)
    assert await subject.table.claim_hedges([(first.rollout_id, third, 0.0)]) == []
    assert await subject.table.hedgeable([1], 10) == []
    held = await subject.table.held([first.rollout_id])
    assert sorted((lease.epoch, lease.session_id, lease.hedged) for lease in held) == [
        (1, first.session_id, True),
        (2, other, True),
    ]
    assert {lease.rollout_id for lease in await subject.table.held_by([other])} == {first.rollout_id, plain.rollout_id}
    await subject.end_session(other)
    orphans = await subject.table.orphaned(10)
    assert (first.rollout_id, 2) in {(lease.rollout_id, lease.epoch) for lease in orphans}
    assert (first.rollout_id, 1) not in {(lease.rollout_id, lease.epoch) for lease in orphans}


@pytest.mark.parametrize("winner", [1, 2])
async def test_the_first_success_supersedes_the_other_attempt(subject: Subject, winner: int) -> None:
    leases = await _hedged(subject)
    async with _ends(subject) as ends:
        won, lost = leases[winner], leases[3 - winner]
        assert await ends.report([_report(won)]) == [CompletionStatus.APPLIED]
        assert await ends.report([_report(lost)]) == [CompletionStatus.LEASE_LOST]
        assert await ends.report([_report(won)]) == [CompletionStatus.DUPLICATE]
    assert await subject.table.held([won.rollout_id]) == []
    stored = {end.epoch: end.kind for end in await subject.table.ended([(won.rollout_id, 1), (won.rollout_id, 2)])}
    assert stored == {winner: FailureKind.NONE, 3 - winner: FailureKind.SUPERSEDED}


@pytest.mark.parametrize("first_to_fail", [1, 2])
async def test_a_failure_beside_a_running_attempt_decides_and_costs_nothing(
    subject: Subject, first_to_fail: int
) -> None:
    leases = await _hedged(subject)
    async with _ends(subject) as ends:
        early, late = leases[first_to_fail], leases[3 - first_to_fail]
        assert await ends.report([_report(early, FailureKind.AGENT_ERROR)]) == [CompletionStatus.APPLIED]
        (held,) = await subject.table.held([late.rollout_id])
        assert (held.epoch, held.session_id, held.charged, held.hedged) == (late.epoch, late.session_id, 0, False)
        assert await subject.table.waiting(1, after=BEFORE_ALL, limit=10) == []
        # The last of the two counts for both.
        assert await ends.report([_report(late, FailureKind.INFRA)]) == [CompletionStatus.APPLIED]
        ((item, _),) = await subject.table.waiting(1, after=BEFORE_ALL, limit=10)
        (again,) = await subject.table.claim([(item.rollout_id, early.session_id)])
        assert again.epoch == 3
        (held,) = await subject.table.held([item.rollout_id])
        assert held.charged == 1
        (hedge,) = await subject.table.claim_hedges([(item.rollout_id, late.session_id, 0.0)])
        assert hedge.epoch == 4


async def test_a_hedge_that_failed_may_be_followed_by_another_under_the_next_epoch(subject: Subject) -> None:
    leases = await _hedged(subject)
    async with _ends(subject) as ends:
        assert await ends.report([_report(leases[2], FailureKind.RELEASED)]) == [CompletionStatus.APPLIED]
        (hedge,) = await subject.table.claim_hedges([(leases[1].rollout_id, leases[2].session_id, 0.0)])
        assert hedge.epoch == 3
        assert await ends.report([_report(leases[2])]) == [CompletionStatus.LEASE_LOST]
        assert await ends.report([_report(hedge)]) == [CompletionStatus.APPLIED]


async def test_both_attempts_reported_at_once_end_the_rollout_once(subject: Subject) -> None:
    for kinds in itertools.product((FailureKind.NONE, FailureKind.AGENT_ERROR), repeat=2):
        leases = await _hedged(subject)
        async with _ends(subject) as ends:
            statuses = await ends.report([_report(leases[1], kinds[0]), _report(leases[2], kinds[1])])
        assert await subject.table.held([leases[1].rollout_id]) == []
        stored = await subject.table.ended([(leases[1].rollout_id, 1), (leases[1].rollout_id, 2)])
        is_won = FailureKind.NONE in kinds
        assert sorted(end.kind for end in stored) == (
            [FailureKind.NONE, FailureKind.SUPERSEDED] if is_won else [FailureKind.AGENT_ERROR] * 2
        )
        assert statuses.count(CompletionStatus.APPLIED) == (1 if is_won else 2)


async def test_a_report_for_another_project_than_the_leases_changes_nothing(subject: Subject) -> None:
    grant = await _leased(subject)
    hedged = await _hedged(subject)
    async with _ends(subject) as ends:
        for kind in (FailureKind.NONE, FailureKind.INFRA):
            foreign = [replace(_report(one, kind), project_id=2) for one in (grant, *hedged.values())]
            assert await ends.report(foreign) == [CompletionStatus.LEASE_LOST] * 3
        assert len(await subject.table.held([grant.rollout_id, hedged[1].rollout_id])) == 3
        # In one commit with the foreign one, and after it.
        assert await ends.report([replace(_report(grant), project_id=2), _report(grant)]) == [
            CompletionStatus.LEASE_LOST,
            CompletionStatus.APPLIED,
        ]
        assert await ends.report([replace(_report(grant), project_id=2)]) == [CompletionStatus.LEASE_LOST]


@pytest.mark.parametrize("in_one_commit", [False, True])
async def test_reports_of_one_attempt_are_applied_once_and_told_apart(subject: Subject, in_one_commit: bool) -> None:
    grant = await _leased(subject)
    reports = [_report(grant), _report(grant), _report(grant, FailureKind.INFRA)]
    async with _ends(subject) as ends:
        if in_one_commit:
            answers = await asyncio.gather(*(ends.report([one]) for one in reports))
        else:
            answers = [await ends.report([one]) for one in reports]
    assert answers == [[CompletionStatus.APPLIED], [CompletionStatus.DUPLICATE], [CompletionStatus.LEASE_LOST]]
    (stored,) = await subject.table.ended([(grant.rollout_id, 1)])
    assert (stored.kind, stored.report) == (FailureKind.NONE, b"r")


def _memory() -> Subject:
    table = MemoryLeaseTable()

    async def add(items: Sequence[ReadyItem], hedged: bool) -> None:
        for item in items:
            table.add(item, POLICY, hedged=hedged)

    async def open_session() -> UUID:
        return uuid7()

    async def end_session(session_id: UUID) -> None:
        table.over.add(session_id)

    async def limit_running(count: int) -> None:
        table.max_running = count

    return Subject(
        table=table, add=add, open_session=open_session, end_session=end_session, limit_running=limit_running
    )


def _place(item: ReadyItem) -> tuple[int, UUID]:
    return item.sort_priority, item.rollout_id


async def _waiting(
    subject: Subject, count: int, *, priorities: Sequence[int] = (0,), hedged: bool = False
) -> list[ReadyItem]:
    items = [
        ReadyItem(
            rollout_id=uuid7(),
            project_id=1,
            sort_priority=priorities[index % len(priorities)],
            request_bytes=len(REQUEST),
        )
        for index in range(count)
    ]
    await subject.add(items, hedged)
    return items


async def _hedged(subject: Subject) -> dict[int, Grant]:
    """Makes a rollout with two leases, by epoch."""
    first = await _leased(subject, hedged=True)
    (second,) = await subject.table.claim_hedges([(first.rollout_id, await subject.open_session(), 0.0)])
    return {first.epoch: first, second.epoch: second}


@asynccontextmanager
async def _ends(subject: Subject) -> AsyncIterator[AttemptEnds]:
    ends = AttemptEnds(table=subject.table, events=QueueEvents())
    role = asyncio.create_task(ends.committer.run())
    yield ends
    role.cancel()


def _report(grant: Grant, kind: FailureKind = FailureKind.NONE) -> AttemptReport:
    return AttemptReport(
        project_id=grant.project_id,
        rollout_id=grant.rollout_id,
        session_id=grant.session_id,
        epoch=grant.epoch,
        kind=kind,
        report=b"r",
    )


async def _leased(subject: Subject, *, hedged: bool = False) -> Grant:
    (item,) = await _waiting(subject, 1, hedged=hedged)
    (grant,) = await subject.table.claim([(item.rollout_id, await subject.open_session())])
    return grant


def _end(grant: Grant, state: RolloutState, kind: FailureKind = FailureKind.NONE) -> AttemptEnd:
    report = replace(_report(grant, kind), report=b"")
    return AttemptEnd(report=report, cancel_requested=False, rollout_state=state, delay_s=0.0, charge=1)


def _new(item: ReadyItem, hedged: bool) -> NewRollout:
    return NewRollout(
        id=item.rollout_id,
        project_id=item.project_id,
        priority=-item.sort_priority,
        max_attempts=POLICY.max_attempts,
        retry_backoff_s=POLICY.backoff_ms / 1000,
        request=REQUEST,
        hedged=hedged,
    )
