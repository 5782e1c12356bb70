"""Use cases of schedules: creates, pauses, resumes and deletes them."""

from __future__ import annotations

from typing import Final

from fulmen.errors import QuotaExceeded, ScheduleExists, ScheduleNotFound
from fulmen.ids import schedule_name
from fulmen_store.malformed import malformed
from fulmen_store.schedules.records import NewSchedule, RunView, ScheduleView
from fulmen_store.schedules.table import ScheduleTable

__all__ = ["Schedules"]

MAX_SCHEDULES: Final = 100
MAX_REASON: Final = 256
RUNS_SHOWN: Final = 20


class Schedules:
    """Schedules of projects."""

    def __init__(self, table: ScheduleTable) -> None:
        self._table = table

    async def create(self, project_id: int, new: NewSchedule) -> ScheduleView:
        """Creates a schedule; returns the one that exists if it has the same content.

        Raises:
            ScheduleExists: If the name is taken by a schedule with other content.
            QuotaExceeded: If the project has the maximum number of schedules.
        """
        view = await self._table.create(project_id, new, max_count=MAX_SCHEDULES)
        if view is not None:
            return view
        found = await self._table.get(project_id, new.name)
        if found is None:
            raise QuotaExceeded(
                f"The project has {MAX_SCHEDULES} schedules, the maximum. Delete one with `fulmen schedule delete`.",
                project=new.project,
                quota="schedules",
            )
        if found.spec != new.spec:
            text = "The name is taken by a schedule with other content. Use another name, or delete that one."
            raise ScheduleExists(text, schedule=schedule_name(new.project, new.name))
        return found

    async def get(self, project_id: int, project: str, name: str) -> tuple[ScheduleView, list[RunView]]:
        """Returns a schedule and its latest runs, newest first.

        Raises:
            ScheduleNotFound: If it does not exist.
        """
        view = _existing(await self._table.get(project_id, name), project, name)
        return view, await self._table.runs(view.id, RUNS_SHOWN)

    async def pause(self, project_id: int, project: str, name: str, reason: str) -> ScheduleView:
        """Pauses a schedule.

        Raises:
            ArgumentInvalid: If the reason is too long.
            ScheduleNotFound: If it does not exist.
        """
        if len(reason) > MAX_REASON or "\0" in reason:
            raise malformed("reason", f"has a NUL character or more than {MAX_REASON} characters")
        return _existing(await self._table.pause(project_id, name, reason), project, name)

    async def resume(self, project_id: int, project: str, name: str) -> ScheduleView:
        """Resumes a schedule.

        Raises:
            ScheduleNotFound: If it does not exist.
        """
        return _existing(await self._table.resume(project_id, name), project, name)

    async def delete(self, project_id: int, project: str, name: str) -> None:
        """Deletes a schedule.

        Raises:
            ScheduleNotFound: If it does not exist.
        """
        if not await self._table.delete(project_id, name):
            raise _not_found(project, name)


def _existing(view: ScheduleView | None, project: str, name: str) -> ScheduleView:
    if view is None:
        raise _not_found(project, name)
    return view


def _not_found(project: str, name: str) -> ScheduleNotFound:
    return ScheduleNotFound("The schedule does not exist.", schedule=schedule_name(project, name))
