"""Background role: removes what belongs to deleted projects, in batches.

Invariant: a project counts as emptied when nothing of it is left and every request that knew its name has ended. Its row stays:
a project of the same name would find what other services keep under it. Every step may be repeated, and by several replicas at
once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import structlog

from fulmen.errors import BlobStorageUnavailable, DatabaseUnavailable
from fulmen_store.database.database import Database
from fulmen_store.rollouts.deletion import Deletion
from fulmen_store.rollouts.rollouts import Rollouts

__all__ = ["DeletedProjects", "ProjectRemover"]

INTERVAL_S: Final = 5.0
# Pause between batches, in favor of other statements.
PAUSE_S: Final = 0.05
ROWS_PER_BATCH: Final = 500
# In this order: rows of the later ones are referred to by those of the earlier ones.
REMOVALS: Final = (
    "remove_groups_of_project", "remove_usage_of_attempts", "remove_usage_of_rollouts", "remove_usage_of_minutes", "remove_recorded_calls",
    "remove_conversations", "remove_recorded_sizes", "remove_stored_responses", "remove_stored_response_sizes", "remove_budget_spend", "remove_counts", "remove_resource_uses",
    "remove_resource_aliases", "remove_resource_dependencies", "remove_resource_versions", "remove_resources", "remove_secrets",
    "remove_schedules", "remove_audit_entries", "remove_request_log", "remove_durations", "remove_lost_runners", "remove_names_of_project",
    "remove_run_leases", "remove_training_runs",
)  # fmt: skip

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class RemovedProject:
    """A deleted project of which something is left, and whether every request that knew its name has ended."""

    project_id: int
    name: str
    is_settled: bool


class DeletedProjects:
    """Reads and removes deleted projects."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def found(self) -> Sequence[RemovedProject]:
        """Returns the deleted projects of which something is left."""
        return [
            RemovedProject(project_id=row["id"], name=row["name"], is_settled=row["is_settled"])
            for row in await self._database.fetch("deleted_projects")
        ]

    async def has_rollouts(self, project_id: int) -> bool:
        """Returns whether rollouts of a project are left."""
        row = await self._database.fetch_row("has_rollouts", project_id)
        return row is not None and row["has"]

    async def has_segments(self, project_id: int) -> bool:
        """Returns whether the blob storage has segments of a project's spans; they go soon."""
        await self._database.fetch("expire_segments_of_project", project_id)
        row = await self._database.fetch_row("has_segments", project_id)
        return row is not None and row["has"]

    async def remove(self, name: str, project_id: int, limit: int) -> int:
        """Removes at most `limit` rows by one statement; returns their number."""
        return len(await self._database.fetch(name, project_id, limit))

    async def mark_emptied(self, project_id: int) -> None:
        """Notes that nothing of a deleted project is left."""
        await self._database.fetch("mark_emptied", project_id)


class ProjectRemover:
    """Removes deleted projects."""

    def __init__(self, *, projects: DeletedProjects, rollouts: Rollouts, deletion: Deletion) -> None:
        self._projects = projects
        self._rollouts = rollouts
        self._deletion = deletion

    async def run(self) -> None:
        """Works until cancelled."""
        while True:
            try:
                await self.run_once()
            except (DatabaseUnavailable, BlobStorageUnavailable) as error:
                _log.warning("project_removal_postponed", reason=error.reason)
            await asyncio.sleep(INTERVAL_S)

    async def run_once(self) -> None:
        """Removes what can be removed now: a project whose attempts are still ending, or that was just deleted, is
        removed later.

        Raises:
            DatabaseUnavailable: If the database is unavailable.
            BlobStorageUnavailable: If payloads could not be removed.
        """
        for project in await self._projects.found():
            await self._empty(project.project_id)
            if project.is_settled and not await self._projects.has_rollouts(project.project_id):
                await self._remove(project)

    async def _empty(self, project_id: int) -> None:
        """Cancels the live rollouts of a project, and removes those that have ended."""
        await self._rollouts.cancel_all(project_id)
        page = await self._deletion.remove_ended(project_id, before=None)
        while page.next_before is not None:
            await asyncio.sleep(PAUSE_S)
            page = await self._deletion.remove_ended(project_id, before=page.next_before)

    async def _remove(self, project: RemovedProject) -> None:
        for name in REMOVALS:
            count = ROWS_PER_BATCH
            while count == ROWS_PER_BATCH:
                count = await self._projects.remove(name, project.project_id, ROWS_PER_BATCH)
                await asyncio.sleep(PAUSE_S)
        if await self._projects.has_segments(project.project_id):
            return
        await self._projects.mark_emptied(project.project_id)
        _log.info("project_removed", project=project.name)
