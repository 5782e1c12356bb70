"""Running rollouts again: final ones by name, dead ones (FAILED) by filter.

Invariant: a filter runs a dead rollout again at most once, whatever number of callers and replicas: the mark is written
in the commit that creates the new rollout. By name it may be run again any number of times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final
from uuid import UUID

from fulmen.errors import DatabaseUnavailable, RolloutStateInvalid
from fulmen.ids import rollout_name
from fulmen_store.rollouts.codec import repeated_rollout
from fulmen_store.rollouts.filter import Expression
from fulmen_store.rollouts.lists import DeadLetterTable
from fulmen_store.rollouts.records import DeadRollout, RolloutRetried, RolloutView
from fulmen_store.rollouts.rollouts import Rollouts
from fulmen_store.rollouts.table import RolloutTable
from fulmen_store.rollouts.transitions import FINAL_STATES

__all__ = [
    "DeadLetters",
    "Rerun",
]

RETRY: Final = "RetryRollouts"
MAX_RETRIED: Final = 1000
MAX_RETRIED_BYTES: Final = 16 * 1024 * 1024
MAX_ROUNDS: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Rerun:
    """The new rollouts, and True if the filter selects more."""

    rollout_ids: Sequence[UUID]
    more: bool


class DeadLetters:
    """Runs rollouts again, each as a new rollout in a group of one."""

    def __init__(
        self,
        *,
        rollouts: Rollouts,
        table: RolloutTable,
        dead: DeadLetterTable,
    ) -> None:
        self._rollouts = rollouts
        self._table = table
        self._dead = dead

    async def retry(self, views: Sequence[RolloutView], *, request_id: str) -> list[UUID]:
        """Runs each of these final rollouts again.

        Raises:
            RolloutStateInvalid: If one is not final, or its stored request is unreadable.
        """
        for view in views:
            if view.state not in FINAL_STATES:
                raise RolloutStateInvalid(
                    "Only a final rollout can be run again.",
                    rollout=rollout_name(view.project, view.rollout_id),
                    state=view.state.name,
                )
        drafts = []
        for view in views:
            draft = repeated_rollout(view)
            if draft is None:
                raise _unreadable(view)
            drafts.append(draft)
        return await self._rollouts.create(drafts, request_id=request_id, method=RETRY)

    async def retry_dead(
        self, project_id: int, run_id: int | None, *, where: Expression | None, request_id: str
    ) -> Rerun:
        """Runs the oldest selected dead rollouts again, skipping those that were already run again.

        Raises:
            QuotaExceeded: If the project's quota of waiting rollouts is exceeded.
            RolloutStateInvalid: If the stored requests of all that are left are unreadable.
        """
        for _ in range(MAX_ROUNDS):
            found = await self._find(project_id, run_id, where, MAX_RETRIED + 1)
            # Read after the search: rollouts that the same request has run since are missing there, but known here.
            first, created = await self._first_result(project_id, request_id)
            if created:
                return Rerun(rollout_ids=first, more=bool(await self._find(project_id, run_id, where, 1)))
            if len(first) > len(found):
                # The first try failed before it wrote anything, and fewer rollouts are left: it is forgotten.
                await self._table.delete_request(project_id, RETRY, request_id, first)
                first = []
            chosen = _bounded(found)[: len(first) or None]
            if not chosen:
                return Rerun(rollout_ids=[], more=False)
            try:
                new_ids = await self._run_again(chosen, request_id)
            except RolloutRetried:
                # Another caller ran one of them again: choose others.
                continue
            return Rerun(rollout_ids=new_ids, more=len(found) > len(chosen))
        raise DatabaseUnavailable("The same rollouts were run again by others repeatedly.")

    async def _first_result(self, project_id: int, request_id: str) -> tuple[list[UUID], bool]:
        if not request_id:
            return [], False
        return await self._rollouts.first_result(project_id, request_id, method=RETRY)

    async def _find(
        self, project_id: int, run_id: int | None, where: Expression | None, limit: int
    ) -> list[DeadRollout]:
        return await self._dead.retryable(project_id, run_id, where=where, limit=limit)

    async def _run_again(self, chosen: Sequence[DeadRollout], request_id: str) -> list[UUID]:
        views = await self._table.view([one.rollout_id for one in chosen])
        drafts = [replace(draft, retry_once=True) for view in views if (draft := repeated_rollout(view)) is not None]
        if not drafts:
            raise _unreadable(views[0])
        return await self._rollouts.create(drafts, request_id=request_id, method=RETRY)


def _unreadable(view: RolloutView) -> RolloutStateInvalid:
    return RolloutStateInvalid(
        "The stored request of the rollout cannot be read, so it cannot be run again.",
        rollout=rollout_name(view.project, view.rollout_id),
        state=view.state.name,
    )


def _bounded(found: Sequence[DeadRollout]) -> list[DeadRollout]:
    """Returns the first of them, as many as one commit takes."""
    chosen: list[DeadRollout] = []
    size_bytes = 0
    for one in found[:MAX_RETRIED]:
        size_bytes += one.size_bytes
        if chosen and size_bytes > MAX_RETRIED_BYTES:
            break
        chosen.append(one)
    return chosen
