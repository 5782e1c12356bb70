"""Windows of rows of a list: statements that look at a bounded number of rows each, for as long as a time limit allows."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final
from uuid import UUID

from fulmen_store.database.database import Database, Row
from fulmen_store.database.days import first_id
from fulmen_store.rollouts.filter import Expression, Field, creation_bounds, required_name, requires_state
from fulmen_store.rollouts.filter_sql import compiled, is_after, order_sql
from fulmen_store.rollouts.ordering import Place, SortKey
from fulmen_store.rollouts.transitions import RolloutState

__all__ = ["HIGHEST_ID", "LOWEST_ID", "MAX_LIMIT_S", "WINDOW_ROWS", "ListWindows", "Pace", "Selected"]

WINDOW_ROWS: Final = 5000
FIRST_ROWS: Final = 250
FEWEST_ROWS: Final = 50
MAX_LIMIT_S: Final = 2.0
LOWEST_ID: Final = UUID(int=0)
HIGHEST_ID: Final = UUID(int=2**128 - 1)
# A supplied id may hold a time up to an hour before its creation and five minutes after it; clocks differ a little more.
ID_BEFORE_CREATION: Final = datetime.timedelta(hours=1, minutes=10)
ID_AFTER_CREATION: Final = datetime.timedelta(minutes=15)
_DIGITS: Final = 32
_WALKS: Final[Mapping[Field, tuple[str, str]]] = {
    Field.REWARD: ("reward_ascending", "reward_descending"),
    Field.DURATION: ("duration_ascending", "duration_descending"),
    Field.TOKEN_COUNT: ("token_count_ascending", "token_count_descending"),
    Field.COST_MICROS: ("cost_micros_ascending", "cost_micros_descending"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Selected:
    """The rollouts of a list: of a project, or of one of its training runs, that `where` selects."""

    project_id: int
    run_id: int | None
    where: Expression | None

    @property
    def is_dead(self) -> bool:
        """Whether all of them have failed."""
        return self.where is not None and requires_state(self.where, RolloutState.FAILED)

    def id_bounds(self) -> tuple[UUID, UUID]:
        """Returns the inclusive lower and the exclusive upper bound of their ids."""
        earliest, latest = creation_bounds(self.where)
        low = LOWEST_ID if earliest is None else _id_at(earliest, -ID_BEFORE_CREATION)
        high = HIGHEST_ID if latest is None else _id_at(latest, ID_AFTER_CREATION)
        if name := required_name(self.where).replace("-", ""):
            low = max(low, UUID(name.ljust(_DIGITS, "0")))
            # The upper bound is exclusive.
            high = min(high, UUID(int=min(int(name.ljust(_DIGITS, "f"), 16) + 1, HIGHEST_ID.int)))
        return low, high


def _id_at(moment: datetime.datetime, shift: datetime.timedelta) -> UUID:
    return first_id(round((moment.timestamp() + shift.total_seconds()) * 1000))


class Pace:
    """How many rows the next window has: as many as half of the time that is left allows at the speed of the last one.

    A window that is twice as slow as the one before it, since it reads from the disk or beside others, still ends in time.
    """

    def __init__(self, clock: Callable[[], float], *, limit_s: float, most: int, first: int = FIRST_ROWS) -> None:
        """Begins; a window has at most `most` rows, the first one `first`."""
        self._clock = clock
        self._began = clock()
        self._until = self._began + limit_s
        self._most = most
        self.rows = min(most, first)

    def is_over(self) -> bool:
        """Returns whether the time is up after a window, or too short for another one; sets the rows of the next one."""
        now = self._clock()
        spent_s, self._began = now - self._began, now
        fitting = self._most if spent_s <= 0 else int(self.rows * self.left_s() / spent_s / 2)
        if self.left_s() <= 0 or fitting < min(self._most, FEWEST_ROWS):
            return True
        self.rows = min(self._most, fitting)
        return False

    def left_s(self) -> float:
        """Returns the time that is left, seconds; never negative."""
        return max(0.0, self._until - self._clock())


class ListWindows:
    """Runs the statements of lists (rollout_lists.sql)."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def end(self, selected: Selected, upper: UUID, lowest: UUID, *, rows: int) -> UUID | None:
        """Returns the id of the last of so many rows below `upper`; None if there are fewer."""
        arguments: list[object] = [selected.project_id, upper, lowest, rows - 1]
        if selected.is_dead:
            row = await self._database.fetch_row("dead_window", *arguments)
        elif selected.run_id is None:
            row = await self._database.fetch_row("project_window", *arguments)
        else:
            row = await self._database.fetch_row("run_window", *arguments, selected.run_id)
        return None if row is None else row["id"]

    async def read(
        self,
        selected: Selected,
        upper: UUID,
        lower: UUID,
        limit: int,
        *,
        order: Sequence[SortKey] = (),
        after: Place | None = None,
        within: str = "",
    ) -> list[Row]:
        """Returns the selected rows from `lower` to below `upper`, at most `limit`, or what `within` makes of them."""
        arguments: list[object] = [selected.project_id, upper, lower, limit]
        if selected.is_dead:
            name, arguments = "list_dead_rollouts", [*arguments, selected.run_id]
        elif selected.run_id is None:
            name = "list_project_rollouts"
        else:
            name, arguments = "list_run_rollouts", [*arguments, selected.run_id]
        condition, values = compiled(selected.where, first=len(arguments) + 1)
        if after is not None:
            condition += f" and {is_after(after, order, len(arguments) + 1, values)}"
        return await self._database.fetch_filtered(
            name, condition, *arguments, *values, order=order_sql(order), within=within
        )

    async def of_ids(self, selected: Selected, ids: Sequence[UUID], limit: int) -> list[Row]:
        """Returns the selected rows of these ids, in their order, at most `limit`."""
        arguments = [ids, selected.project_id, limit, selected.run_id]
        condition, values = compiled(selected.where, first=len(arguments) + 1)
        return await self._database.fetch_filtered("list_rollouts_of_ids", condition, *arguments, *values)

    async def places(
        self, selected: Selected, key: SortKey, value: float, rollout_id: UUID, limit: int
    ) -> list[tuple[float, UUID]]:
        """Returns values and ids after a place in the order of one figure, of all rollouts of the project or training run."""
        ascending, descending = _WALKS[key.field]
        rows = await self._database.fetch(
            descending if key.descending else ascending, selected.project_id, value, rollout_id, limit, selected.run_id
        )
        return [(row["value"], row["id"]) for row in rows]
