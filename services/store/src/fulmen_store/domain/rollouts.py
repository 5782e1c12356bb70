"""Use cases of the queue: create, cancel, retry.

Invariant: creation is idempotent twice over, by the caller's rollout ids and by its request id.
"""

from __future__ import annotations

import datetime
from collections.abc import Awaitable, Callable, Iterable, Sequence, Set
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Final, Protocol
from uuid import UUID

from fulmen.errors import DatabaseUnavailable, FulmenError, RolloutExists, RolloutNotFound, RolloutStateInvalid
from fulmen.ids import rollout_name
from fulmen_store.domain.dispatcher import Dispatcher
from fulmen_store.domain.fair_queue import ReadyItem, waits_since
from fulmen_store.domain.group_commit import GroupCommitter
from fulmen_store.domain.leases import Grant
from fulmen_store.domain.resource_uses import ExpiringVersions, VersionKey
from fulmen_store.domain.rollout_requests import NewRollout, check_rollouts
from fulmen_store.domain.seats import CancelAsked, Notice
from fulmen_store.domain.transitions import FINAL_STATES, FailureKind, RetryPolicy, RolloutState

__all__ = [
    "CancelOutcome",
    "Cancelled",
    "NameKind",
    "NewItem",
    "RolloutTable",
    "RolloutView",
    "Rollouts",
    "RunningAttempt",
]

CREATE: Final = "BatchCreateRollouts"
RETRY: Final = "RetryRollouts"
CANCEL_PAGE: Final = 1000
MAX_CANCEL_ROUNDS: Final = 5
RETRY_OF: Final = "fulmen.retry_of"


class NameKind(IntEnum):
    """What an interned name is."""

    TASK_TYPE = 1
    AGENT = 2


# Not frozen: one is made for every rollout, and freezing makes that four times as slow. Never changed.
@dataclass(slots=True, kw_only=True)
class NewItem:
    """A row to create; `uses` are those of its `versions` that have a ttl."""

    rollout_id: UUID
    project_id: int
    run_id: int | None
    group_key: UUID | None
    group_size: int
    rank: int
    not_before: datetime.datetime | None
    policy: RetryPolicy
    labels: tuple[str, ...]
    request: bytes
    mode: int = 1
    group_id: str = ""
    task_type: int | None = None
    agent: int | None = None
    deadline: datetime.datetime | None = None
    timeout_ms: int = 900_000
    hedged: bool = False
    versions: tuple[str, ...] = ()
    uses: tuple[VersionKey, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningAttempt:
    """The attempt that runs now."""

    number: int
    session_id: UUID
    host: str
    started_at: datetime.datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutView:
    """A rollout as it is now.

    Attributes:
        ended_attempts: how many attempts have ended; counted in lists only.
    """

    rollout_id: UUID
    project_id: int
    request: bytes
    state: RolloutState
    failure_kind: FailureKind
    created_at: datetime.datetime
    ended_at: datetime.datetime | None
    running: RunningAttempt | None
    ended_attempts: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancelled:
    """What a cancellation did to one rollout; without a session it was waiting and is now final."""

    rollout_id: UUID
    project_id: int
    session_id: UUID | None
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelOutcome:
    """How many rollouts were cancelled at once, and how many were asked to stop."""

    cancelled: int
    cancelling: int


class RolloutTable(Protocol):
    """Where rollouts live."""

    async def project_id(self, name: str) -> int:
        """Returns a project's number.

        Raises:
            ProjectNotFound: if there is no such project.
        """
        ...

    async def run_id(self, project_id: int, name: str) -> int:
        """Returns a training run's number; a new run is recorded."""
        ...

    async def name_id(self, project_id: int, kind: NameKind, name: str) -> int:
        """Returns the number of a name that many rollouts share; a new name is recorded."""
        ...

    async def create(self, items: Sequence[NewItem], sessions: Sequence[UUID | None]) -> set[UUID]:
        """Creates those that do not exist, in one commit; returns their ids.

        Args:
            items: the rows.
            sessions: for each row the runner session that gets its first lease in the same commit, or None.
        """
        ...

    async def stored(self, rollout_ids: Sequence[UUID]) -> dict[UUID, tuple[int, bytes]]:
        """Returns project and request of those rollouts that exist."""
        ...

    async def view(self, rollout_ids: Sequence[UUID]) -> list[RolloutView]:
        """Returns those rollouts that exist, in the order of the ids."""
        ...

    async def live_of_run(self, project_id: int, run_id: int, limit: int) -> list[UUID]:
        """Returns rollouts of a training run that are neither final nor asked to stop."""
        ...

    async def cancel(self, rollout_ids: Sequence[UUID], *, grace_s: float) -> list[Cancelled]:
        """Cancels waiting rollouts and marks running ones, in one commit; a row that just changed is left out.

        A marked one is ended when its runner reports, and by the store after `grace_s` seconds at the latest.
        """
        ...

    async def log_request(self, project_id: int, method: str, request_id: str, result: bytes) -> bytes:
        """Records a request's result unless it has one; returns the recorded one."""
        ...


class Rollouts:
    """Creates, cancels and repeats rollouts."""

    def __init__(
        self,
        *,
        table: RolloutTable,
        versions: ExpiringVersions,
        dispatcher: Dispatcher,
        finished: Callable[[frozenset[int]], None],
        tell: Callable[[Sequence[tuple[UUID, Notice]]], None],
        admit: Callable[[Iterable[int]], Awaitable[None]],
        new_ids: Callable[[int], Sequence[UUID]],
        now: Callable[[], datetime.datetime],
        cancel_grace_s: float = 30.0,
        observe_batch: Callable[[str, int], None] = lambda _name, _rows: None,
    ) -> None:
        """Wires the use cases.

        Args:
            table: where rollouts live.
            versions: knows the versions that have a ttl.
            dispatcher: finds runners for what is new, and is told what has to wait.
            finished: told the projects in which rollouts became final.
            tell: passes notices on to runner sessions.
            admit: refuses new rollouts, each named by its project, of which too many would wait.
            new_ids: mints so many UUIDv7s.
            now: the clock, in UTC.
            cancel_grace_s: how long a runner has to stop a cancelled attempt, seconds.
            observe_batch: told the size of every commit.
        """
        self._table = table
        self._versions = versions
        self._dispatcher = dispatcher
        self._finished = finished
        self._tell = tell
        self._admit = admit
        self._new_ids = new_ids
        self._now = now
        self._cancel_grace_s = cancel_grace_s
        self.creations: GroupCommitter[NewItem, bool] = GroupCommitter(
            "create_rollouts", self._create, observe_batch=observe_batch
        )

    async def create(self, rollouts: Sequence[NewRollout], *, request_id: str = "", method: str = CREATE) -> list[UUID]:
        """Creates rollouts, all or none, and returns their ids in order once they are durable.

        Raises:
            ArgumentInvalid: with every problem of every rollout.
            RolloutExists: if a supplied name is taken by different content.
            QuotaExceeded: if the project may not have so many waiting.
        """
        check_rollouts(rollouts, request_id=request_id, now_ms=round(self._now().timestamp() * 1000))
        items = await self._items(rollouts)
        ids = [item.rollout_id for item in items]
        repeated = False
        if request_id:
            logged = await self._first_ids(items[0].project_id, method, request_id, ids)
            repeated = logged != ids
            if len(logged) != len(ids):
                return logged
            items = [_with_id(item, rollout_id) for item, rollout_id in zip(items, logged, strict=True)]
        missing = items
        if repeated:
            stored = await self._table.stored(logged)
            missing = [item for item in items if item.rollout_id not in stored]
        elif any(rollout.name for rollout in rollouts):
            missing = await self._missing(items)
        uses = await self._versions.uses_of([(item.project_id, item.versions) for item in missing])
        missing = [replace(item, uses=keys) if keys else item for item, keys in zip(missing, uses, strict=True)]
        await self._admit(item.project_id for item in missing)
        created = await self.creations.submit(missing, size_bytes=sum(len(item.request) + 128 for item in missing))
        if not all(created):
            await self._missing([item for item, new in zip(missing, created, strict=True) if not new])
        return [item.rollout_id for item in items]

    async def cancel(self, rollout_ids: Sequence[UUID]) -> CancelOutcome:
        """Cancels rollouts: waiting ones at once, running ones by asking their runners; final ones stay.

        The caller has checked that all of them exist.
        """
        pending = set(rollout_ids)
        cancelled = cancelling = 0
        for _ in range(MAX_CANCEL_ROUNDS):
            done = await self._table.cancel(list(pending), grace_s=self._cancel_grace_s)
            self._announce_cancelled(done)
            cancelled += sum(one.session_id is None for one in done)
            cancelling += sum(one.session_id is not None for one in done)
            pending -= {one.rollout_id for one in done}
            if not pending:
                break
            views = await self._table.view(list(pending))
            pending = {view.rollout_id for view in views if view.state not in FINAL_STATES}
            if not pending:
                break
        if pending:
            raise DatabaseUnavailable("Some rollouts kept changing while they were cancelled.", count=len(pending))
        return CancelOutcome(cancelled=cancelled, cancelling=cancelling)

    async def cancel_run(self, project_id: int, training_run: str) -> CancelOutcome:
        """Cancels every rollout of a training run that is not final."""
        run_id = await self._table.run_id(project_id, training_run)
        cancelled = cancelling = 0
        while ids := await self._table.live_of_run(project_id, run_id, CANCEL_PAGE):
            outcome = await self.cancel(ids)
            cancelled += outcome.cancelled
            cancelling += outcome.cancelling
        return CancelOutcome(cancelled=cancelled, cancelling=cancelling)

    async def retry(
        self,
        rollout_ids: Sequence[UUID],
        *,
        request_id: str,
        again: Callable[[RolloutView], NewRollout],
    ) -> list[UUID]:
        """Creates a new rollout from the request of each final one; `again` makes it.

        Raises:
            RolloutNotFound: if a name is unknown.
            RolloutStateInvalid: if one is not final.
        """
        views = {view.rollout_id: view for view in await self._table.view(rollout_ids)}
        for rollout_id in rollout_ids:
            view = views.get(rollout_id)
            if view is None:
                raise RolloutNotFound("There is no such rollout.", rollout=rollout_name(rollout_id))
            if view.state not in FINAL_STATES:
                raise RolloutStateInvalid(
                    "Only a final rollout can be run again.", rollout=rollout_name(rollout_id), state=view.state.name
                )
        return await self.create(
            [again(views[rollout_id]) for rollout_id in rollout_ids], request_id=request_id, method=RETRY
        )

    async def _items(self, rollouts: Sequence[NewRollout]) -> list[NewItem]:
        scopes: dict[tuple[str, str, str, str], _Scope] = {}
        for rollout in rollouts:
            key = rollout.scope
            if key not in scopes:
                scopes[key] = await self._scope(rollout)
        fresh = iter(self._new_ids(sum(not rollout.name for rollout in rollouts)))
        return [
            _item(rollout, scopes[rollout.scope], UUID(rollout.name.partition("/")[2]) if rollout.name else next(fresh))
            for rollout in rollouts
        ]

    async def _scope(self, rollout: NewRollout) -> _Scope:
        table = self._table
        project_id = await table.project_id(rollout.project)
        task_type = rollout.task_type or rollout.agent_id
        return _Scope(
            project_id=project_id,
            run_id=await table.run_id(project_id, rollout.training_run) if rollout.training_run else None,
            task_type=await table.name_id(project_id, NameKind.TASK_TYPE, task_type) if task_type else None,
            agent=await table.name_id(project_id, NameKind.AGENT, rollout.agent) if rollout.agent else None,
        )

    async def _first_ids(self, project_id: int, method: str, request_id: str, ids: Sequence[UUID]) -> list[UUID]:
        packed = await self._table.log_request(project_id, method, request_id, b"".join(one.bytes for one in ids))
        return [UUID(bytes=packed[start : start + 16]) for start in range(0, len(packed), 16)]

    async def _missing(self, items: Sequence[NewItem]) -> list[NewItem]:
        stored = await self._table.stored([item.rollout_id for item in items])
        for item in items:
            if item.rollout_id in stored and stored[item.rollout_id] != (item.project_id, item.request):
                raise RolloutExists("The name is taken by a different rollout.", rollout=rollout_name(item.rollout_id))
        return [item for item in items if item.rollout_id not in stored]

    async def _create(self, items: Sequence[NewItem]) -> list[bool]:
        now = self._now()
        waiting = [(_ready(item), _delay_s(item, now)) for item in items]
        # A runner that waits gets the rollout in the commit that creates it.
        matches = self._dispatcher.match_new([ready for ready, delay_s in waiting if delay_s <= 0])
        sessions = [matches[item.rollout_id].session_id if item.rollout_id in matches else None for item in items]
        try:
            created = await self._table.create(items, sessions)
        except DatabaseUnavailable:
            self._dispatcher.doubt(matches)
            raise
        except FulmenError:
            self._dispatcher.unmatch(matches)
            raise
        self._dispatcher.deliver_new(matches, _first_grants(items, sessions, created))
        rest = [one for one in waiting if one[0].rollout_id in created and one[0].rollout_id not in matches]
        if rest:
            self._dispatcher.offer(rest)
        # Of two callers that named the same rollout in one commit, the first created it.
        answers = []
        for item in items:
            answers.append(item.rollout_id in created)
            created.discard(item.rollout_id)
        return answers

    def _announce_cancelled(self, done: Sequence[Cancelled]) -> None:
        finished = frozenset(one.project_id for one in done if one.session_id is None)
        if finished:
            self._finished(finished)
        self._tell(
            [
                (one.session_id, CancelAsked(attempts=[(one.rollout_id, one.epoch)]))
                for one in done
                if one.session_id is not None
            ]
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scope:
    """The numbers of the names that a rollout refers to."""

    project_id: int
    run_id: int | None
    task_type: int | None
    agent: int | None


def _item(rollout: NewRollout, scope: _Scope, rollout_id: UUID) -> NewItem:
    return NewItem(
        rollout_id=rollout_id,
        project_id=scope.project_id,
        run_id=scope.run_id,
        group_key=rollout.group_key(scope.project_id) if rollout.group_id else None,
        group_size=rollout.group_size,
        rank=-rollout.priority,
        not_before=rollout.not_before,
        policy=rollout.policy,
        labels=rollout.labels if rollout.required_labels else (),
        request=rollout.request,
        mode=rollout.mode,
        group_id=rollout.group_id,
        task_type=scope.task_type,
        agent=scope.agent,
        deadline=rollout.deadline,
        timeout_ms=max(1, round(rollout.attempt_timeout_s * 1000)),
        hedged=rollout.hedged,
        versions=rollout.versions,
    )


def _with_id(item: NewItem, rollout_id: UUID) -> NewItem:
    return item if item.rollout_id == rollout_id else replace(item, rollout_id=rollout_id)


def _ready(item: NewItem) -> ReadyItem:
    run_at_s = item.not_before.timestamp() if item.not_before is not None else None
    return ReadyItem(
        rollout_id=item.rollout_id,
        project_id=item.project_id,
        rank=item.rank,
        labels=frozenset(item.labels),
        group_key=item.group_key,
        task_type=item.task_type,
        agent=item.agent,
        since_s=waits_since(item.rollout_id, run_at_s),
    )


def _delay_s(item: NewItem, now: datetime.datetime) -> float:
    return (item.not_before - now).total_seconds() if item.not_before is not None else 0.0


def _first_grants(items: Sequence[NewItem], sessions: Sequence[UUID | None], created: Set[UUID]) -> list[Grant]:
    return [
        Grant(rollout_id=item.rollout_id, session_id=session, epoch=1, project_id=item.project_id, request=item.request)
        for item, session in zip(items, sessions, strict=True)
        if session is not None and item.rollout_id in created
    ]
