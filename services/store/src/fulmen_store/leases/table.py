"""Leases, sessions and the feed in PostgreSQL."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Final
from uuid import UUID

import asyncpg

from fulmen_service_kit.security.tokens import Caller
from fulmen_store.database.database import Database, columns
from fulmen_store.database.server_clock import LATE_S
from fulmen_store.leases.attempt_checks import Leases, RolloutLeases
from fulmen_store.leases.leases import (
    AttemptEnd,
    EndedAttempt,
    EndedReport,
    Grant,
    HedgeCandidate,
    HeldLease,
    LeasedAttempt,
    Project,
    QuotaClaim,
    SessionOwner,
)
from fulmen_store.metrics import StoreMetrics
from fulmen_store.projects.names import ProjectNames
from fulmen_store.rollouts.transitions import MAX_LOST_RUNNERS, AttemptState, FailureKind, RetryPolicy, RolloutState
from fulmen_store.runners.session_updates import SessionUpdate
from fulmen_store.scheduling.fair_queue import ReadyItem, waits_since
from fulmen_store.scheduling.table import terms_of

__all__ = [
    "AttemptCheckTable",
    "OverdueAttempt",
    "OverdueReason",
    "OverdueTable",
    "PgLeaseTable",
    "SessionTable",
    "ended_of",
    "grant_of",
    "item_of",
]


# A dictionary lookup takes a third of the time of calling the enumeration.
_STATES: Final = {state.value: state for state in RolloutState}
_KINDS: Final = {kind.value: kind for kind in FailureKind}

# First key of the advisory locks of quotas; the second is the project.
QUOTA_LOCK: Final = 0x71756F74


class PgLeaseTable:
    """Implements `LeaseTable` in PostgreSQL.

    `projects` knows the names of all returned projects. `lost_to_pause` rollouts that lost their runners pause an agent
    version.
    """

    def __init__(self, database: Database, projects: ProjectNames, *, lost_to_pause: int = 3) -> None:
        self._database = database
        self._projects = projects
        self._lost_to_pause = lost_to_pause

    async def claim(self, choices: Sequence[tuple[UUID, UUID]]) -> list[Grant]:
        """Grants a lease to each (rollout, session) pair whose rollout waits; returns the grants."""
        return [grant_of(row) for row in await self._database.fetch("claim_rollouts", *columns(choices, 2))]

    async def claim_within(self, project_id: int, choices: Sequence[tuple[UUID, UUID]]) -> QuotaClaim:
        """Claims rollouts of one project in order, up to its quota."""
        async with self._database.transaction() as transaction:
            # Claims for this project wait here until the previous claim is committed, and then see it.
            await transaction.fetch("lock_project_quota", QUOTA_LOCK, project_id)
            row = await transaction.fetch_row("running_room", project_id)
            room = len(choices) if row is None or row["room"] is None else max(0, row["room"])
            rows = await transaction.fetch("claim_rollouts", *columns(choices[:room], 2)) if room else []
        grants = [grant_of(row) for row in rows]
        return QuotaClaim(tried=min(room, len(choices)), grants=grants, room=room - len(grants))

    async def held(self, rollout_ids: Sequence[UUID]) -> list[HeldLease]:
        """Returns the leases on these rollouts."""
        return await self._leases(await self._database.fetch("held_leases", rollout_ids))

    async def held_by(self, session_ids: Sequence[UUID]) -> list[HeldLease]:
        """Returns the leases of these sessions."""
        return await self._leases(await self._database.fetch("session_leases", session_ids))

    async def orphaned(self, limit: int) -> list[HeldLease]:
        """Returns leases whose session has ended."""
        return await self._leases(await self._database.fetch("orphaned_leases", limit))

    async def end(self, ends: Sequence[AttemptEnd]) -> list[EndedAttempt]:
        """Writes the ends whose lease is unchanged, in one commit; returns them."""
        rows = [
            (
                end.report.rollout_id, end.report.session_id, end.report.epoch, end.cancel_requested,
                AttemptState.FAILED if end.report.kind else AttemptState.SUCCEEDED, end.report.kind,
                end.rollout_state, end.delay_s, end.charge, end.report.report, end.report.project_id, end.lost_runners,
                end.report.reward, end.report.failure, end.report.printed,
            )
            for end in ends
        ]  # fmt: skip
        written = await self._database.fetch("end_attempts", *columns(rows, 15), self._lost_to_pause)
        await self._projects.load(row["project_id"] for row in written)
        return [ended_of(row) for row in written]

    async def end_hedged(self, ends: Sequence[AttemptEnd]) -> list[EndedAttempt]:
        """Writes ends of hedged attempts, at most one per rollout, in one commit."""
        rows = [
            (
                end.report.rollout_id, end.report.session_id, end.report.epoch, end.cancel_requested,
                AttemptState.FAILED if end.report.kind else AttemptState.SUCCEEDED, end.report.kind,
                end.rollout_state, end.report.report, end.report.project_id, end.report.reward, end.report.failure,
                end.report.printed,
            )
            for end in ends
        ]  # fmt: skip
        written = await self._database.fetch("end_hedged_attempts", *columns(rows, 12))
        await self._projects.load(row["project_id"] for row in written)
        return [
            replace(
                ended_of(row),
                superseded=(row["rival_session"], row["rival_epoch"]) if row["rival_session"] is not None else None,
            )
            for row in written
        ]

    async def hedgeable(self, project_ids: Sequence[int], limit: int) -> list[HedgeCandidate]:
        """Returns attempts that may be hedged and are not hedged yet, oldest first."""
        return [
            HedgeCandidate(item=item_of(row), session_id=row["session"], age_s=row["age_s"])
            for row in await self._database.fetch("hedgeable_attempts", project_ids, limit)
        ]

    async def claim_hedges(self, choices: Sequence[tuple[UUID, UUID, float]]) -> list[Grant]:
        """Grants second leases by (rollout, session, age) if another session has held the first for `age` seconds."""
        return [grant_of(row) for row in await self._database.fetch("claim_hedges", *columns(choices, 3))]

    async def ended(self, keys: Sequence[tuple[UUID, int]]) -> list[EndedReport]:
        """Returns the stored ends of attempts named by (rollout, epoch)."""
        return [
            EndedReport(
                project_id=row["project_id"],
                rollout_id=row["rollout_id"],
                epoch=row["number"],
                session_id=row["session"],
                kind=FailureKind(row["failure_kind"]),
                report=row["report"],
            )
            for row in await self._database.fetch("ended_attempts", *columns(keys, 2))
        ]

    async def projects(self) -> list[Project]:
        """Returns all projects."""
        rows = await self._database.fetch("all_projects")
        self._projects.learn_all(rows)
        return [Project(project_id=row["id"], name=row["name"], terms=terms_of(row)) for row in rows]

    async def oldest(self, project_id: int, *, per_priority: int) -> list[tuple[ReadyItem, float]]:
        """Returns the oldest waiting items of each sort_priority, each with the seconds until it may run."""
        rows = await self._database.fetch("oldest_of_each_priority", project_id, per_priority)
        return [(item_of(row), row["delay_s"]) for row in rows]

    async def waiting(self, project_id: int, *, after: tuple[int, UUID], limit: int) -> list[tuple[ReadyItem, float]]:
        """Returns one page of waiting items in order, each with the seconds until it may run."""
        rows = await self._database.fetch("refill_queue", project_id, after[0], after[1], limit)
        return [(item_of(row), row["delay_s"]) for row in rows]

    async def _leases(self, rows: Sequence[asyncpg.Record]) -> list[HeldLease]:
        await self._projects.load(row["project_id"] for row in rows)
        return [_held(row) for row in rows]


class AttemptBoundTable:
    """Writes what durations of task types bound attempts to."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def add(self, bounds: Sequence[tuple[UUID, UUID, int, int]]) -> None:
        """Records bounds, each of a rollout, a session and an epoch, milliseconds; bounds of ended leases are
        dropped."""
        await self._database.fetch("bound_attempts", *columns(bounds, 4))


class SessionTable:
    """Reads and writes runner sessions."""

    def __init__(self, database: Database, metrics: StoreMetrics | None = None) -> None:
        self._database = database
        self._metrics = metrics

    async def open(self, session_id: UUID, *, owner: SessionOwner, host: str, info: bytes, ttl_s: float) -> None:
        """Records a new session."""
        await self._database.fetch("open_session", session_id, owner.subject, host, info, ttl_s, owner.project)

    async def resume(self, session_id: UUID, *, owner: SessionOwner, ttl_s: float) -> bool:
        """Extends a session; returns False if it is unknown, has ended or belongs to another owner."""
        return bool(await self._database.fetch("resume_session", session_id, ttl_s, owner.subject, owner.project))

    async def projects_of(self, session_ids: Sequence[UUID]) -> dict[UUID, str]:
        """Returns the projects of sessions' tokens, including ended sessions."""
        rows = await self._database.fetch("session_projects", session_ids)
        return {row["id"]: row["project"] for row in rows}

    async def renew(self, signs: Sequence[SessionUpdate], *, ttl_s: float) -> list[UUID]:
        """Extends active sessions and writes their updates; returns the live ones."""
        rows = [(sign.session_id, sign.active, sign.load, sign.ended, sign.failed) for sign in signs]
        ids, *noted = columns(rows, 5)
        return [row["id"] for row in await self._database.fetch("renew_sessions", ids, ttl_s, *noted)]

    async def end(self, session_ids: Sequence[UUID]) -> list[UUID]:
        """Ends sessions; returns those that were live."""
        return [row["id"] for row in await self._database.fetch("end_sessions", session_ids)]

    async def clock_has_run_for(self, seconds: float) -> bool:
        """Returns whether the database's clock was not set for so long; see `Database.clock_has_run_for`."""
        return await self._database.clock_has_run_for(seconds)

    async def end_expired(self) -> list[UUID]:
        """Ends expired sessions; returns them."""
        rows = await self._database.fetch("end_expired_sessions", self._database.clock(), LATE_S)
        if self._metrics is not None:
            self._metrics.runners_lost(sum(row["lost_leases"] > 0 for row in rows))
        return [row["id"] for row in rows]


def ended_of(row: asyncpg.Record) -> EndedAttempt:
    """Decodes a written end."""
    state = _STATES[row["rollout_state"]]
    # Most of the item is needed only if the rollout waits again.
    item = (
        item_of(row)
        if state is RolloutState.RETRY_WAIT
        else ReadyItem(rollout_id=row["id"], project_id=row["project_id"], task_type=row["task_type"])
    )
    return EndedAttempt(
        item=item,
        session_id=row["session"],
        epoch=row["epoch"],
        kind=_KINDS[row["failure_kind"]],
        rollout_state=state,
        duration_s=row["duration_s"],
    )


def grant_of(row: asyncpg.Record) -> Grant:
    """Decodes a granted lease."""
    return Grant(
        rollout_id=row["id"],
        session_id=row["session"],
        epoch=row["epoch"],
        project_id=row["project_id"],
        request=row["request"],
        task_type=row["task_type"],
        continues=row["continues"] or 0,
    )


def _held(row: asyncpg.Record) -> HeldLease:
    return HeldLease(
        rollout_id=row["id"],
        session_id=row["session"],
        epoch=row["epoch"],
        project_id=row["project_id"],
        charged=row["charged"],
        policy=RetryPolicy(
            max_attempts=row["max_attempts"], retry_mask=row["retry_mask"], backoff_ms=row["backoff_ms"]
        ),
        cancel_requested=row["cancel_requested"],
        time_left_s=row["time_left_s"],
        hedged=row["hedged"],
        lost_runners=row["runner_losses"],
        lost_beside=row["lost_beside"],
    )


def item_of(row: asyncpg.Record) -> ReadyItem:
    """Decodes the queue item of a rollout."""
    return ReadyItem(
        rollout_id=row["id"],
        project_id=row["project_id"],
        sort_priority=row["sort_priority"],
        labels=frozenset(row["labels"] or ()),
        group_key=row["group_key"],
        task_type=row["task_type"],
        agent=row["agent"],
        runs_alone=row["runner_losses"] >= MAX_LOST_RUNNERS,
        request_bytes=row["request_bytes"],
        since_s=waits_since(row["id"], row["first_run_at_s"]),
    )


class AttemptCheckTable:
    """Reads the state of attempts for checks."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def runs(self, key: Caller) -> bool:
        """Returns whether the attempt of a key has not ended."""
        assert key.attempt is not None
        (found,) = await self.read([(key.attempt.rollout_id, key.attempt.number)])
        return found is not None and found.project == key.project and key.attempt.number in found.leases.epochs

    async def read(self, attempts: Sequence[tuple[UUID, int]]) -> list[RolloutLeases | None]:
        """Returns the state of each attempt (rollout, number), in order; None for an unknown rollout."""
        found: list[RolloutLeases | None] = [None] * len(attempts)
        for row in await self._database.fetch("check_attempts", *columns(attempts, 2)):
            held = [epoch for epoch in (row["lease_epoch"], row["hedge_epoch"]) if epoch is not None]
            found[row["n"] - 1] = RolloutLeases(
                project=row["project"],
                mode=row["mode"],
                leases=Leases(epochs=frozenset(held), cancel_requested=bool(row["cancel_requested"])),
                ended=None if row["state"] is None else AttemptState(row["state"]),
                training_run=row["training_run"],
                agent=row["agent"],
            )
        return found


class OverdueTable:
    """Finds overdue attempts and waiting rollouts. `projects` knows the names of all returned projects."""

    def __init__(self, database: Database, projects: ProjectNames) -> None:
        self._database = database
        self._projects = projects

    async def overdue(self, *, attempt_grace_s: float, limit: int) -> list[OverdueAttempt]:
        """Returns leases whose attempt is past its timeout plus grace, its cancel grace or its deadline."""
        clock = self._database.clock
        rows = await self._database.fetch(
            "overdue_attempts", attempt_grace_s, limit, clock.ahead_from_s, clock.ahead_by_s, clock(), LATE_S
        )
        await self._projects.load(row["project_id"] for row in rows)
        return [
            OverdueAttempt(
                attempt=LeasedAttempt(row["project_id"], row["id"], row["epoch"]),
                session_id=row["session"],
                reason=OverdueReason(row["reason"]),
            )
            for row in rows
        ]

    async def clock_has_run_for(self, seconds: float) -> bool:
        """Returns whether the database's clock was not set for so long; see `Database.clock_has_run_for`."""
        return await self._database.clock_has_run_for(seconds)

    async def fail_waiting(self, limit: int) -> list[int]:
        """Ends waiting rollouts whose deadline has passed, in one commit; returns the project of each."""
        return [row["project_id"] for row in await self._database.fetch("fail_overdue_rollouts", limit)]


class OverdueReason(IntEnum):
    """Why an attempt is overdue."""

    CANCEL_GRACE = 1
    DEADLINE = 2
    TIMEOUT = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class OverdueAttempt:
    """A lease whose attempt is overdue."""

    attempt: LeasedAttempt
    session_id: UUID
    reason: OverdueReason
