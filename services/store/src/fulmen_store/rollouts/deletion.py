"""Deletion of ended rollouts, with their attempts and spans.

Invariant: a rollout is kept while another member of its group is live, since the feed would never announce the group, and
while its training run is in progress. The usage of its model calls is always kept.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final
from uuid import UUID

from fulmen.errors import BlobStorageUnavailable, RolloutStateInvalid
from fulmen.ids import rollout_name
from fulmen_store.database.database import Database, Transaction, columns
from fulmen_store.rollouts.filter import Expression, both, states_filter
from fulmen_store.rollouts.lists import ListedIds, RolloutLists
from fulmen_store.rollouts.records import RolloutView
from fulmen_store.rollouts.transitions import FINAL_STATES
from fulmen_store.segments.table import remove_extents
from fulmen_store.spans.blob_refs import span_folder
from fulmen_store.spans.blobs import Blobs

__all__ = ["Deleted", "Deletion", "DeletionTable"]

ROLLOUTS_PER_BATCH: Final = 500
BLOBS_LIMIT_S: Final = 60.0
ENDED: Final = states_filter(frozenset(state.value for state in FINAL_STATES))


class RolloutKept(Exception):
    """A rollout has to be kept; nothing was written."""

    def __init__(self, rollout_id: UUID) -> None:
        super().__init__("A rollout must be kept.")
        self.rollout_id = rollout_id


@dataclass(frozen=True, slots=True, kw_only=True)
class Removed:
    """The number of removed rollouts, and the removed rollouts that had payloads in the blob storage."""

    count: int
    with_blobs: Sequence[UUID]


@dataclass(frozen=True, slots=True, kw_only=True)
class Deleted:
    """The numbers of deleted and of kept rollouts, and the id below which a filter selects more; None at the end."""

    deleted: int
    kept: int
    next_before: UUID | None


class DeletionTable:
    """Removes ended rollouts."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def remove(self, rollout_ids: Sequence[UUID], *, whole: bool = False, needed: bool = False) -> Removed:
        """Removes the rollouts that need not be kept, in one commit; with `whole` all or none.

        With `needed`, also those that would have to be kept; the caller removes all others of their groups, too.

        Raises:
            RolloutKept: With `whole`, if one has to be kept.
        """
        async with self._database.transaction() as transaction:
            free = await _hold(transaction, sorted(rollout_ids), needed=needed)
            kept = [rollout_id for rollout_id in rollout_ids if rollout_id not in free]
            if whole and kept:
                raise RolloutKept(kept[0])
            ids = list(free)
            chunks = await transaction.fetch_of_days("remove_chunks", ids, ids)
            # After the chunks: those that were just moved are found by their places.
            await remove_extents(transaction, ids)
            for name in (
                "remove_attempts",
                "remove_ends",
                "remove_rollout_usage",
                "remove_rollouts",
                "remove_annotations",
                "remove_effects",
                "remove_retry_marks",
            ):
                await transaction.fetch(name, ids)
            removed = columns(list(Counter(key for key in free.values() if key is not None).items()), 2)
            for name in ("remove_whole_groups", "shrink_groups"):
                await transaction.fetch(name, *removed)
        with_blobs = {row["rollout_id"] for row in chunks if row["blob"] is not None}
        return Removed(count=len(ids), with_blobs=sorted(with_blobs))


async def _hold(transaction: Transaction, rollout_ids: Sequence[UUID], *, needed: bool) -> dict[UUID, UUID | None]:
    """Locks rollouts and their groups; returns those that may be removed, each with its group."""
    ended = await transaction.fetch("hold_ended", rollout_ids)
    keys = sorted({row["group_key"] for row in ended if row["group_key"] is not None})
    groups = await transaction.fetch("hold_groups", keys)
    is_open = {row["group_key"] for row in groups if row["is_open"]}
    return {
        row["rollout_id"]: row["group_key"]
        for row in ended
        if needed or not (row["is_needed"] or row["group_key"] in is_open)
    }


class Deletion:
    """Deletes ended rollouts."""

    def __init__(self, *, table: DeletionTable, lists: RolloutLists, blobs: Blobs | None) -> None:
        """Creates the use case; without blob storage `blobs` is None."""
        self._table = table
        self._lists = lists
        self._blobs = blobs

    async def delete(self, views: Sequence[RolloutView]) -> int:
        """Deletes all of these rollouts or none; returns their number.

        Raises:
            RolloutStateInvalid: If one has to be kept.
            BlobStorageUnavailable: If the rollouts are deleted, but some payloads of their spans are left.
        """
        by_id = {view.rollout_id: view for view in views}
        try:
            removed = await self._table.remove(list(by_id), whole=True)
        except RolloutKept as error:
            view = by_id[error.rollout_id]
            raise RolloutStateInvalid(
                "Only a rollout that has ended, with its group and training run, can be deleted.",
                rollout=rollout_name(view.project, view.rollout_id),
                state=view.state.name,
            ) from None
        await self._remove_blobs(removed.with_blobs)
        return removed.count

    async def delete_selected(
        self, project_id: int, run_id: int | None, *, where: Expression | None, before: UUID | None
    ) -> Deleted:
        """Deletes the newest ended rollouts that `where` selects, with ids below `before`, as many as one commit takes.

        Raises:
            BlobStorageUnavailable: If the rollouts are deleted, but some payloads of their spans are left.
        """
        where = both(ENDED, where)
        page = await self._lists.ids(project_id, run_id, where=where, before=before, limit=ROLLOUTS_PER_BATCH)
        return await self._delete_page(page, needed=False)

    async def remove_ended(self, project_id: int, *, before: UUID | None) -> Deleted:
        """Deletes ended rollouts of a project whose rollouts are all removed; otherwise as `delete_selected`."""
        page = await self._lists.ids(project_id, None, where=ENDED, before=before, limit=ROLLOUTS_PER_BATCH)
        return await self._delete_page(page, needed=True)

    async def _delete_page(self, page: ListedIds, *, needed: bool) -> Deleted:
        removed = await self._table.remove(page.ids, needed=needed)
        await self._remove_blobs(removed.with_blobs)
        return Deleted(deleted=removed.count, kept=len(page.ids) - removed.count, next_before=page.next_before)

    async def _remove_blobs(self, rollout_ids: Sequence[UUID]) -> None:
        if self._blobs is None:
            return
        try:
            async with asyncio.timeout(BLOBS_LIMIT_S):
                for rollout_id in rollout_ids:
                    await self._blobs.remove_folder(span_folder(rollout_id))
        except TimeoutError:
            raise BlobStorageUnavailable("Payloads of deleted spans could not be removed in time.") from None
