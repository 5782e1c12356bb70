"""Rollouts in PostgreSQL."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from uuid import UUID

import asyncpg

from fulmen.ids import parse_training_run_name
from fulmen_store.database.database import Database, Transaction, columns
from fulmen_store.database.queries import arguments
from fulmen_store.projects.names import ProjectNames
from fulmen_store.rollouts.feed_cursor import Cursor, Selection
from fulmen_store.rollouts.number_cache import NumberCache
from fulmen_store.rollouts.records import (
    NO_RUN,
    AttemptView,
    Cancelled,
    NameKind,
    RolloutAppeared,
    RolloutRetried,
    RolloutView,
    RunningAttempt,
)
from fulmen_store.rollouts.requests import NewRollout
from fulmen_store.rollouts.transitions import AttemptState, FailureKind, RolloutState
from fulmen_store.run_leases.run_leases import RunFence
from fulmen_store.run_leases.table import hold_fences

__all__ = [
    "FeedNews",
    "FeedRow",
    "FeedTable",
    "RolloutTable",
    "view_of",
]

ID_BYTES = 16
RETRY_TABLE = "rollout_retry"
KEYED_TABLES = ("item", "rollout")
UNLIMITED_BYTES = 2**62


class RolloutTable:
    """Creates, reads and cancels rollouts."""

    def __init__(self, database: Database, projects: ProjectNames) -> None:
        self._database = database
        self.projects = projects
        self._runs = NumberCache()
        self._names = NumberCache()

    async def project_id(self, name: str) -> int:
        """Returns a project's number.

        Raises:
            ProjectNotFound: If the project does not exist.
        """
        return await self.projects.require(name)

    async def run_id(self, project_id: int, name: str) -> int:
        """Returns the number of a project's training run, whose name was checked; a new run is recorded."""
        return await self._number(self._runs, "ensure_training_run", project_id, name)

    async def find_run(self, project_id: int, name: str) -> int:
        """Returns the number of a project's training run without recording anything; `NO_RUN` if the project has none.

        Raises:
            ArgumentInvalid: If the name is malformed.
        """
        parse_training_run_name(name)
        return await self._number(self._runs, "find_training_run", project_id, name)

    async def name_id(self, project_id: int, kind: NameKind, name: str) -> int:
        """Returns the number of an interned name; records a new name."""
        return await self._number(self._names, "ensure_name", project_id, kind, name)

    async def _number(self, cache: NumberCache, statement: str, *key: object) -> int:
        known = cache.get(key)
        if known is None:
            row = await self._database.fetch_row(statement, *key)
            if row is None:
                return NO_RUN
            known = row["id"]
            cache.put(key, known)
        return known

    async def create(self, rollouts: Sequence[NewRollout]) -> set[UUID]:
        """Creates rollouts in one commit, those with a matched session together with its lease; returns their ids.

        Raises:
            RolloutAppeared: If one of them exists.
            RolloutRetried: If a rollout with `retry_once` runs one again that already was.
            RunLeaseLost: If a fenced training run has another epoch.
        """
        uses = columns([(*key, one.id) for one in rollouts for key in one.uses], 3)
        values = arguments("rollouts/rollouts.sql", "rollout+item+derived", rollouts, as_text=True)
        retries = [one for one in rollouts if one.retry_of is not None]
        fences = list({(one.project_id, one.fence) for one in rollouts if one.fence is not None})
        try:
            if not retries and not fences:
                created = await self._database.fetch("create_rollouts", *uses, *values)
            else:
                async with self._database.transaction() as transaction:
                    await hold_fences(transaction, fences)
                    await _mark_retried(transaction, retries)
                    created = await transaction.fetch("create_rollouts", *uses, *values)
        except asyncpg.UniqueViolationError as error:
            if error.table_name == RETRY_TABLE:
                raise RolloutRetried("A rollout was run again concurrently.") from error
            if error.table_name not in KEYED_TABLES:
                raise
            raise RolloutAppeared("A rollout of the same name was created concurrently.") from error
        return {row["id"] for row in created}

    async def stored(self, rollout_ids: Sequence[UUID]) -> dict[UUID, tuple[int, bytes]]:
        """Returns project and request of those rollouts that exist."""
        rows = await self._database.fetch("stored_requests", rollout_ids)
        return {row["id"]: (row["project_id"], row["request"]) for row in rows}

    async def view(
        self,
        rollout_ids: Sequence[UUID],
        *,
        with_usage: bool = False,
        with_attempts: bool = False,
        max_bytes: int = UNLIMITED_BYTES,
    ) -> list[RolloutView]:
        """Returns the rollouts that exist, in the order of the ids, each with everything requested as of one moment.

        Args:
            rollout_ids: Their ids.
            with_usage: Whether to read the usage of their calls.
            with_attempts: Whether to read their latest ended attempts.
            max_bytes: Bytes of requests after which no more rollouts are read.
        """
        rows = await self._database.fetch("get_rollouts", rollout_ids, with_usage, with_attempts, max_bytes)
        await self.projects.load(row["project_id"] for row in rows)
        return [view_of(row, self.projects) for row in rows]

    async def view_final(self, rollout_ids: Sequence[UUID], *, max_bytes: int) -> tuple[list[RolloutView], int]:
        """Returns final rollouts with their latest attempts, of which nothing changes any more, and how many ids were read.

        Those that do not exist are left out. Two statements take less CPU for many than one that also holds for rollouts
        that run.

        Args:
            rollout_ids: Their ids.
            max_bytes: Bytes of requests, and of reports, after which no more rollouts are read; one is read at least.
        """
        views = await self.view(rollout_ids, max_bytes=max_bytes)
        ended: dict[UUID, list[AttemptView]] = {}
        left_bytes = max_bytes
        for row in await self._database.fetch("get_attempts", [view.rollout_id for view in views], max_bytes):
            *attempt, rollout_id = row
            ended.setdefault(rollout_id, []).append(_ended(attempt))
            left_bytes -= len(row["report"])
        read = len(rollout_ids)
        if left_bytes <= 0:
            # Attempts of the last rollout may be missing.
            last = next(reversed(ended))
            whole = next(index for index, view in enumerate(views) if view.rollout_id == last)
            views = views[: max(1, whole)]
        if left_bytes <= 0 or sum(len(view.request) for view in views) >= max_bytes:
            read = rollout_ids.index(views[-1].rollout_id) + 1
        found = [
            # Attempts are numbered without gaps.
            replace(view, ended=attempts, ended_attempts=attempts[-1].number if attempts else 0)
            for view, attempts in ((view, ended.get(view.rollout_id, ())) for view in views)
        ]
        return found, read

    async def attempts(self, rollout_id: UUID, *, after: int, limit: int) -> list[AttemptView]:
        """Returns the ended attempts of a rollout with numbers above `after`, oldest first."""
        return [_ended(row) for row in await self._database.fetch("list_attempts", rollout_id, after, limit)]

    async def printed(self, rollout_id: UUID) -> dict[int, bytes]:
        """Returns the stored `PrintedTail` of the latest attempts of a rollout that have one, by number."""
        rows = await self._database.fetch("get_printed", rollout_id)
        return {row["number"]: row["printed"] for row in rows}

    async def live_of_project(self, project_id: int, *, page_size: int) -> AsyncIterator[list[UUID]]:
        """Yields the rollouts of a project that are neither final nor asked to stop, in the order of their queue."""
        after = (-(2**15), UUID(int=0))
        while rows := await self._database.fetch("live_rollouts", project_id, *after, page_size):
            after = (rows[-1]["sort_priority"], rows[-1]["id"])
            yield [row["id"] for row in rows]

    async def live_of_run(self, project_id: int, run_id: int, *, page_size: int) -> AsyncIterator[list[UUID]]:
        """Yields the rollouts of a training run that are neither final nor asked to stop, newest first."""
        before = UUID(int=2**128 - 1)
        while rows := await self._database.fetch("live_rollouts_of_run", project_id, run_id, before, page_size):
            before = rows[-1]["id"]
            if found := [row["id"] for row in rows if row["is_live"]]:
                yield found

    async def cancel(
        self, rollout_ids: Sequence[UUID], *, grace_s: float, fence: tuple[int, RunFence] | None = None
    ) -> list[Cancelled]:
        """Cancels waiting rollouts and marks running ones, in one commit; their runners have the grace to stop.

        Raises:
            RunLeaseLost: If the fenced training run, given with its project, has another epoch.
        """
        if fence is None:
            rows = await self._database.fetch("cancel_rollouts", sorted(rollout_ids), grace_s)
        else:
            async with self._database.transaction() as transaction:
                await hold_fences(transaction, [fence])
                rows = await transaction.fetch("cancel_rollouts", sorted(rollout_ids), grace_s)
        await self.projects.load(row["project_id"] for row in rows)
        return [
            Cancelled(rollout_id=row["id"], project_id=row["project_id"], session_id=row["session"], epoch=row["epoch"])
            for row in rows
        ]

    async def log_request(
        self, project_id: int, method: str, request_id: str, rollout_ids: Sequence[UUID]
    ) -> list[UUID]:
        """Records the ids that a request's rollouts get unless it has some; returns the recorded ones."""
        row = await self._database.fetch_row("log_request", project_id, method, request_id, _packed(rollout_ids))
        if row is not None:
            return list(rollout_ids)
        # It can be missing only if it has just expired.
        return await self.logged_request(project_id, method, request_id) or list(rollout_ids)

    async def logged_request(self, project_id: int, method: str, request_id: str) -> list[UUID]:
        """Returns the recorded ids of a request; none if it is unknown."""
        row = await self._database.fetch_row("logged_request", project_id, method, request_id)
        return [] if row is None else _unpacked(row["result"])

    async def delete_request(self, project_id: int, method: str, request_id: str, rollout_ids: Sequence[UUID]) -> None:
        """Removes a request's record if it holds these ids."""
        await self._database.fetch("delete_request", project_id, method, request_id, _packed(rollout_ids))


async def _mark_retried(transaction: Transaction, rollouts: Sequence[NewRollout]) -> None:
    for name, once in (("mark_retried_once", True), ("mark_retried", False)):
        rows = [(one.retry_of, one.id) for one in rollouts if one.retry_once is once]
        if rows:
            await transaction.fetch(name, *columns(rows, 2))


def _packed(rollout_ids: Sequence[UUID]) -> bytes:
    return b"".join(one.bytes for one in rollout_ids)


def _unpacked(packed: bytes) -> list[UUID]:
    return [UUID(bytes=packed[start : start + ID_BYTES]) for start in range(0, len(packed), ID_BYTES)]


def view_of(row: asyncpg.Record, projects: ProjectNames) -> RolloutView:
    """Decodes a snapshot of a rollout; the name of its project is known."""
    if row["end_state"] is not None:
        state = RolloutState(row["end_state"])
    elif row["session"] is not None:
        state = RolloutState.RUNNING
    elif row["delayed"] and row["epoch"]:
        state = RolloutState.RETRY_WAIT
    else:
        state = RolloutState.QUEUED
    running = []
    if state is RolloutState.RUNNING:
        running.append(_running(row, ""))
        if row.get("hedge_session") is not None:
            running.append(_running(row, "hedge_"))
    return RolloutView(
        rollout_id=row["id"],
        project_id=row["project_id"],
        project=projects.name(row["project_id"]),
        request=row["request"],
        state=state,
        failure_kind=FailureKind(row["failure_kind"] or 0),
        created_at=row["created_at"],
        ended_at=row["ended_at"],
        running=sorted(running, key=lambda attempt: attempt.number),
        ended=[_ended(attempt) for attempt in row.get("attempts", ())],
        ended_attempts=row.get("ended_attempts", 0),
        priority=-row["sort_priority"],
        reward=row["reward"],
        duration_s=row["duration_s"],
        failure_message=row["failure_message"] or "",
        prompt_token_count=row["prompt_token_count"],
        completion_token_count=row["completion_token_count"],
        cost_micros=row["cost_micros"],
        retry_at=row["run_at"] if state is RolloutState.RETRY_WAIT else None,
    )


def _running(row: asyncpg.Record, prefix: str) -> RunningAttempt:
    return RunningAttempt(
        number=row[f"{prefix}epoch"],
        session_id=row[f"{prefix}session"],
        host=row[f"{prefix}host"] or "",
        started_at=row[f"{prefix}leased_at"],
        progress=row.get(f"{prefix}progress") or b"",
        # Lists do not read it.
        timeout_ms=None if prefix else row.get("timeout_ms"),
    )


def _ended(row: Iterable[Any]) -> AttemptView:
    number, state, failure_kind, rollout_state, session_id, started_at, ended_at, report, host = row
    return AttemptView(
        number=number,
        state=AttemptState(state),
        failure_kind=FailureKind(failure_kind),
        rollout_state=RolloutState(rollout_state),
        session_id=session_id,
        host=host or "",
        started_at=started_at,
        ended_at=ended_at,
        report=report,
    )


class FeedTable:
    """Reads the completion feed."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def scan(self, selection: Selection, *, after: Cursor, limit: int) -> list[FeedRow]:
        """Returns settled rows after a cursor, in order."""
        position = (selection.project_id, after.xid, after.rollout_id, limit)
        if selection.group_key is not None:
            rows = await self._database.fetch("scan_group_feed", *position, selection.group_key)
        elif selection.run_id is None:
            rows = await self._database.fetch("scan_project_feed", *position)
        else:
            rows = await self._database.fetch("scan_run_feed", *position, selection.run_id)
        return [
            FeedRow(
                cursor=Cursor(xid=row["xid"], rollout_id=row["rollout_id"]),
                group_key=row["group_key"],
                completes=bool(row["completes"]),
            )
            for row in rows
        ]

    async def members(self, group_keys: Sequence[UUID]) -> dict[UUID, list[UUID]]:
        """Returns the members of groups, by group."""
        members: dict[UUID, list[UUID]] = {key: [] for key in group_keys}
        for row in await self._database.fetch("group_members", list(members)):
            members[row["group_key"]].append(row["rollout_id"])
        return members

    async def news(self, bounds: Mapping[int, int | None], *, limit: int) -> list[FeedNews]:
        """Returns what is new in projects, each since its bound; a bound of None means now.

        Args:
            bounds: A transaction id per project: `settled` of the last answer.
            limit: Ends of a project after which no more are read.
        """
        rows = await self._database.fetch("feed_news", list(bounds), list(bounds.values()), limit)
        return [
            FeedNews(
                project_id=row["project_id"],
                settled=row["settled"],
                run_ids=None if row["ends"] >= limit else frozenset(row["run_ids"] or ()),
                waited_s=None if row["waited_s"] is None else max(0.0, row["waited_s"]),
            )
            for row in rows
        ]

    async def newest_transaction(self) -> int:
        """Returns an upper bound of all transaction ids so far."""
        row = await self._database.fetch_row("newest_transaction")
        assert row is not None
        return int(row[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedRow:
    """One final rollout in feed order.

    Attributes:
        group_key: Key of its group; None for a group of one.
        completes: Whether it was the last member of its group to end.
    """

    cursor: Cursor
    group_key: UUID | None
    completes: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedNews:
    """What is new in a project's feed.

    Attributes:
        settled: The transaction id below which all ends were read.
        run_ids: Training runs with new ends, None for ends without one; None as a whole if there are more than were read.
        waited_s: For how long the first end that watchers may not see yet has waited, seconds; None if there is none.
    """

    project_id: int
    settled: int
    run_ids: frozenset[int | None] | None
    waited_s: float | None
