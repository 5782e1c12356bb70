"""Use cases of the queue: create and cancel.

Invariant: creation is idempotent, by the caller's rollout names and by its request id.
"""

from __future__ import annotations

import datetime
from collections.abc import AsyncIterator, Sequence, Set
from dataclasses import dataclass
from typing import Final
from uuid import UUID

from fulmen.errors import ArgumentInvalid, DatabaseUnavailable, FulmenError, RolloutExists, Violation
from fulmen.ids import parse_rollout_name, rollout_name, uuid7s
from fulmen_store.clock import Clock
from fulmen_store.database.group_commit import GroupCommitter
from fulmen_store.events import QueueEvents
from fulmen_store.leases.leases import Grant, LeasedAttempt
from fulmen_store.metrics import StoreMetrics
from fulmen_store.resources.lifetimes import ExpiringVersions
from fulmen_store.rollouts.records import (
    Cancelled,
    CancelOutcome,
    NameKind,
    RolloutAppeared,
)
from fulmen_store.rollouts.requests import NewRollout, check_rollouts, group_key_of
from fulmen_store.rollouts.table import RolloutTable
from fulmen_store.rollouts.transitions import FINAL_STATES
from fulmen_store.run_leases.run_leases import RunFence
from fulmen_store.scheduling.dispatcher import Dispatcher
from fulmen_store.scheduling.fair_queue import ReadyItem, waits_since
from fulmen_store.scheduling.quotas import QueueQuotas
from fulmen_store.scheduling.runner_streams import CancelRequested

__all__ = ["Rollouts"]

CREATE: Final = "BatchCreateRollouts"
MAX_CREATE_ROUNDS: Final = 5
CANCEL_PAGE: Final = 1000
MAX_CANCEL_ROUNDS: Final = 5


class Rollouts:
    """Creates and cancels rollouts."""

    def __init__(
        self,
        *,
        table: RolloutTable,
        versions: ExpiringVersions,
        quotas: QueueQuotas,
        dispatcher: Dispatcher,
        events: QueueEvents,
        cancel_grace_s: float,
        metrics: StoreMetrics | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Creates the use cases.

        Args:
            table: Table of rollouts.
            versions: Resource versions with a ttl.
            quotas: Limits on waiting rollouts.
            dispatcher: Finds runners for new rollouts.
            events: Receives finished projects, waiting work and notices for runner sessions.
            cancel_grace_s: Time that a runner has to stop a cancelled attempt, seconds.
            metrics: Instruments; by default none.
            clock: Clock; the system's by default.
        """
        self._table = table
        self._versions = versions
        self._quotas = quotas
        self._dispatcher = dispatcher
        self._events = events
        self._clock = clock or Clock()
        self._cancel_grace_s = cancel_grace_s
        self.creations: GroupCommitter[NewRollout, bool] = GroupCommitter(
            "create_rollouts", self._create, metrics=metrics
        )

    async def create(
        self,
        rollouts: Sequence[NewRollout],
        *,
        request_id: str = "",
        method: str = CREATE,
        fence: RunFence | None = None,
    ) -> list[UUID]:
        """Creates rollouts, all or none, and returns their ids in order once they are durable.

        Raises:
            ArgumentInvalid: With every problem of every rollout.
            RolloutExists: If a supplied name is taken by different content.
            QuotaExceeded: If the project's quota of waiting rollouts is exceeded.
            BudgetExceeded: If a budget of their training run or agent is used up.
            RunLeaseLost: If the fenced training run has another epoch.
        """
        for rollout in rollouts:
            rollout.fence = fence
        try:
            check_rollouts(rollouts, request_id=request_id, now_ms=round(self._clock.utc_now().timestamp() * 1000))
        except ArgumentInvalid:
            # A time may have passed since: that keeps no repeat from its first result.
            first = await self._repeated(rollouts, request_id=request_id, method=method)
            if not first:
                raise
            return first
        await self._resolve(rollouts)
        items = rollouts
        named = any(rollout.name for rollout in rollouts)
        if not request_id:
            await self._create_missing(items, doubted=named)
            return [item.id for item in items]
        project_id, ids = items[0].project_id, [item.id for item in items]
        first = await self._table.log_request(project_id, method, request_id, ids)
        if first != ids:
            if await self._all_stored(first):
                return first
            _set_ids(items, first)
        try:
            await self._create_missing(items, doubted=named or first != ids)
        except DatabaseUnavailable:
            raise
        except FulmenError:
            # A concurrent repetition of the request may have created it, even from other content.
            if await self._all_stored(first):
                return first
            await self._table.delete_request(project_id, method, request_id, first)
            raise
        return first

    async def create_with_ids(self, rollouts: Sequence[NewRollout], ids: Sequence[UUID]) -> None:
        """Creates rollouts with these ids, all or none of those that do not exist; repeating it changes nothing.

        Raises: as `create`.
        """
        check_rollouts(rollouts, request_id="", now_ms=None)
        await self._resolve(rollouts)
        _set_ids(rollouts, ids)
        await self._create_missing(rollouts, doubted=True)

    async def first_result(self, project_id: int, request_id: str, *, method: str) -> tuple[list[UUID], bool]:
        """Returns the ids recorded for a request id, and True if their rollouts exist."""
        first = await self._table.logged_request(project_id, method, request_id)
        return first, bool(first) and await self._all_stored(first)

    async def _repeated(self, rollouts: Sequence[NewRollout], *, request_id: str, method: str) -> list[UUID]:
        """Returns the ids of a repeated request; none if it is the first."""
        try:
            check_rollouts(rollouts, request_id=request_id, now_ms=None)
        except ArgumentInvalid:
            return []
        await self._resolve(rollouts)
        items = rollouts
        if request_id:
            first, created = await self.first_result(items[0].project_id, request_id, method=method)
            return first if created else []
        return [] if await self._missing(items) else [item.id for item in items]

    async def _create_missing(self, items: Sequence[NewRollout], *, doubted: bool) -> None:
        """Creates the missing ones in one commit; `doubted` is True if some may exist."""
        missing = await self._missing(items) if doubted else list(items)
        uses = await self._versions.uses_of([(item.project_id, item.versions) for item in missing])
        for item, keys in zip(missing, uses, strict=True):
            item.uses = keys
        self._quotas.used_up.require(missing)
        await self._quotas.admit(item.project_id for item in missing)
        for _ in range(MAX_CREATE_ROUNDS):
            try:
                await self.creations.submit(missing, size_bytes=sum(len(item.request) + 128 for item in missing))
                return
            except RolloutAppeared:
                # One of them was created concurrently: nothing of this request was written.
                there = {item.id for item in items} - {item.id for item in await self._missing(items)}
                missing = [item for item in missing if item.id not in there]
        raise DatabaseUnavailable("Rollouts of the same names were created concurrently.")

    async def _all_stored(self, rollout_ids: Sequence[UUID]) -> bool:
        return len(await self._table.stored(rollout_ids)) == len(set(rollout_ids))

    async def cancel(self, rollout_ids: Sequence[UUID], *, fence: tuple[int, RunFence] | None = None) -> CancelOutcome:
        """Cancels waiting rollouts immediately and asks the runners of running ones to stop; final ones are unchanged.

        The caller has checked that all of them exist.
        """
        pending = set(rollout_ids)
        cancelled = cancelling = 0
        for _ in range(MAX_CANCEL_ROUNDS):
            done = await self._table.cancel(list(pending), grace_s=self._cancel_grace_s, fence=fence)
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
            raise DatabaseUnavailable("Some rollouts changed repeatedly while they were cancelled.", count=len(pending))
        return CancelOutcome(cancelled=cancelled, cancelling=cancelling)

    async def cancel_run(self, project_id: int, training_run: str, *, fence: RunFence | None = None) -> CancelOutcome:
        """Cancels every rollout of a training run that is not final.

        Raises:
            RunLeaseLost: If the fenced training run has another epoch.
        """
        run_id = await self._table.find_run(project_id, training_run)
        pages = self._table.live_of_run(project_id, run_id, page_size=CANCEL_PAGE)
        return await self._cancel_pages(pages, held=None if fence is None else (project_id, fence))

    async def cancel_all(self, project_id: int) -> CancelOutcome:
        """Cancels every rollout of a project that is not final."""
        return await self._cancel_pages(self._table.live_of_project(project_id, page_size=CANCEL_PAGE), held=None)

    async def _cancel_pages(
        self, pages: AsyncIterator[list[UUID]], *, held: tuple[int, RunFence] | None
    ) -> CancelOutcome:
        cancelled = cancelling = 0
        async for page in pages:
            outcome = await self.cancel(page, fence=held)
            cancelled += outcome.cancelled
            cancelling += outcome.cancelling
        return CancelOutcome(cancelled=cancelled, cancelling=cancelling)

    async def _resolve(self, rollouts: Sequence[NewRollout]) -> None:
        """Resolves the names of rollouts to numbers, and gives ids to those without a name."""
        scopes: dict[tuple[str, str, str, str], _Scope] = {}
        # Those of one time are queued and listed by their ids: in the order of the request.
        new_ids = iter(sorted(uuid7s(sum(not rollout.name for rollout in rollouts))))
        for rollout in rollouts:
            scope = scopes.get(rollout.scope)
            if scope is None:
                scope = scopes[rollout.scope] = await self._scope(rollout)
            rollout.id = parse_rollout_name(rollout.name).rollout_id if rollout.name else next(new_ids)
            rollout.project_id, rollout.run_id = scope.project_id, scope.run_id
            rollout.task_type, rollout.agent = scope.task_type, scope.agent
            if rollout.group_id:
                rollout.group_key = group_key_of(scope.project_id, rollout.training_run, rollout.group_id)

    async def _scope(self, rollout: NewRollout) -> _Scope:
        table = self._table
        project_id = await table.project_id(rollout.project)
        task_type = rollout.task_type_name or rollout.default_task_type
        agent = rollout.agent_name
        return _Scope(
            project_id=project_id,
            run_id=await table.run_id(project_id, rollout.training_run) if rollout.training_run else None,
            task_type=await table.name_id(project_id, NameKind.TASK_TYPE, task_type) if task_type else None,
            agent=await table.name_id(project_id, NameKind.AGENT, agent) if agent else None,
        )

    async def _missing(self, items: Sequence[NewRollout]) -> list[NewRollout]:
        stored = await self._table.stored([item.id for item in items])
        for item in items:
            if item.id in stored and stored[item.id] != (item.project_id, item.request):
                name = rollout_name(item.project, item.id)
                raise RolloutExists("The name is taken by a different rollout.", rollout=name)
        return [item for item in items if item.id not in stored]

    async def _create(self, items: Sequence[NewRollout]) -> list[bool]:
        now = self._clock.utc_now()
        waiting = [(_ready(item), _delay_s(item, now)) for item in items]
        # A runner that waits gets the rollout in the commit that creates it.
        matches = self._dispatcher.match_new([ready for ready, delay_s in waiting if delay_s <= 0])
        for item in items:
            item.matched = matches[item.id].session_id if item.id in matches else None
        try:
            created = await self._table.create(items)
        except DatabaseUnavailable:
            self._dispatcher.mark_in_doubt(matches)
            raise
        except FulmenError:
            self._dispatcher.unmatch(matches)
            raise
        self._dispatcher.deliver_new(matches, _first_grants(items, created))
        rest = [one for one in waiting if one[0].rollout_id not in matches] if matches else waiting
        if len(created) < len(items):
            rest = [one for one in rest if one[0].rollout_id in created]
        if rest:
            self._events.work_ready.emit(rest)
        return [item.id in created for item in items] if len(created) < len(items) else [True] * len(items)

    def _announce_cancelled(self, done: Sequence[Cancelled]) -> None:
        finished = frozenset(one.project_id for one in done if one.session_id is None)
        if finished:
            self._events.projects_finished.emit(finished)
        self._events.session_notices.emit(
            [
                (one.session_id, CancelRequested(attempts=[LeasedAttempt(one.project_id, one.rollout_id, one.epoch)]))
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


def _set_ids(rollouts: Sequence[NewRollout], ids: Sequence[UUID]) -> None:
    """Gives rollouts the ids that the first request of the same request id was given.

    Raises:
        ArgumentInvalid: If that request had another number of rollouts.
    """
    if len(rollouts) != len(ids):
        text = f"was used by an unfinished request with {len(ids)} rollouts"
        raise ArgumentInvalid(
            "The request id belongs to another request.", violations=[Violation(field="request_id", description=text)]
        )
    for rollout, rollout_id in zip(rollouts, ids, strict=True):
        rollout.id = rollout_id


def _ready(item: NewRollout) -> ReadyItem:
    run_at_s = item.not_before.timestamp() if item.not_before is not None else None
    return ReadyItem(
        rollout_id=item.id,
        project_id=item.project_id,
        sort_priority=item.sort_priority,
        labels=item.labels if item.required_labels else frozenset(),
        group_key=item.group_key,
        task_type=item.task_type,
        agent=item.agent,
        request_bytes=item.request_bytes,
        since_s=waits_since(item.id, run_at_s),
    )


def _delay_s(item: NewRollout, now: datetime.datetime) -> float:
    return (item.not_before - now).total_seconds() if item.not_before is not None else 0.0


def _first_grants(items: Sequence[NewRollout], created: Set[UUID]) -> list[Grant]:
    return [
        Grant(
            rollout_id=item.id,
            session_id=item.matched,
            epoch=1,
            project_id=item.project_id,
            request=item.request,
            task_type=item.task_type,
        )
        for item in items
        if item.matched is not None and item.id in created
    ]
