"""Lists of rollouts in PostgreSQL, in bounded time even if a filter selects few of them.

A list scans an index by id in windows of rows until the page is full, the rows end or its time limit has passed. A page
may therefore be short, or even empty, although more follow (AIP-158). A list in another order is sorted if it is short; a
longer one walks the index of reward, duration, tokens or cost in windows, likewise (docs/decisions/0058).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final
from uuid import UUID

import asyncpg

from fulmen.errors import ArgumentInvalid, Violation
from fulmen_store.clock import Clock
from fulmen_store.database.database import Database
from fulmen_store.projects.names import ProjectNames
from fulmen_store.rollouts.filter import Expression, Field, absent, both, value_bounds
from fulmen_store.rollouts.filter_sql import compiled
from fulmen_store.rollouts.ordering import Place, SortKey
from fulmen_store.rollouts.records import DeadRollout, RolloutView
from fulmen_store.rollouts.table import view_of
from fulmen_store.rollouts.transitions import FailureKind, RolloutState
from fulmen_store.rollouts.windows import (
    HIGHEST_ID,
    LOWEST_ID,
    MAX_LIMIT_S,
    WINDOW_ROWS,
    ListWindows,
    Pace,
    Selected,
)

__all__ = [
    "DeadLetterTable",
    "ListedIds",
    "ListedPage",
    "RolloutCounts",
    "RolloutLists",
    "SortedPage",
]

# To sort fewer takes less time than to walk an index beside them.
SORTED_AT_ONCE: Final = 5_000
MAX_SORTED: Final = 100_000
MAX_INTEGER: Final = 2**63 - 1
WALKED: Final[Mapping[Field, float]] = {
    Field.REWARD: math.inf,
    Field.DURATION: math.inf,
    Field.TOKEN_COUNT: MAX_INTEGER,
    Field.COST_MICROS: MAX_INTEGER,
}
"""Figures with an index, each with a bound of its values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedPage:
    """One page, and the id below which the next one begins; None at the end."""

    views: list[RolloutView]
    next_before: UUID | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedIds:
    """The ids of one page, and the id below which the next one begins; None at the end."""

    ids: list[UUID]
    next_before: UUID | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutCounts:
    """Numbers of rollouts by state and failure kind, and whether there may be more than were counted."""

    parts: Mapping[tuple[RolloutState, FailureKind], int]
    has_more: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SortedPage:
    """One page of a list in an order, and the place after which the next one begins; None at the end."""

    views: list[RolloutView]
    next_after: Place | None


class RolloutLists:
    """Reads lists of rollouts."""

    def __init__(
        self,
        database: Database,
        projects: ProjectNames,
        *,
        window_rows: int = WINDOW_ROWS,
        max_sorted: int = MAX_SORTED,
        sorted_at_once: int = SORTED_AT_ONCE,
        clock: Clock | None = None,
    ) -> None:
        """Creates the reader.

        Args:
            database: Where they are.
            projects: Names of projects.
            window_rows: Rows that a statement reads at most.
            max_sorted: Rows of a list in an order without an index, at most.
            sorted_at_once: Rows up to which a list is sorted although its order has an index.
            clock: Measures the time limits.
        """
        self._projects = projects
        self._windows = ListWindows(database)
        self._window_rows = window_rows
        self._max_sorted = max_sorted
        self._sorted_at_once = sorted_at_once
        self._clock = (clock or Clock()).monotonic_s

    async def page(
        self,
        project_id: int,
        run_id: int | None,
        *,
        where: Expression | None,
        before: UUID | None,
        limit: int,
        limit_s: float = MAX_LIMIT_S,
    ) -> ListedPage:
        """Returns rollouts that `where` selects, newest first, with ids below `before`."""
        selected = Selected(project_id=project_id, run_id=run_id, where=where)
        rows, next_before = await self._page(selected, before, limit, limit_s)
        return ListedPage(views=await self._views(selected, rows), next_before=next_before)

    async def ids(
        self,
        project_id: int,
        run_id: int | None,
        *,
        where: Expression | None,
        before: UUID | None,
        limit: int,
    ) -> ListedIds:
        """Returns the ids of rollouts that `where` selects, newest first, with ids below `before`."""
        selected = Selected(project_id=project_id, run_id=run_id, where=where)
        rows, next_before = await self._page(selected, before, limit, MAX_LIMIT_S, within="ids_listed")
        return ListedIds(ids=[row["id"] for row in rows], next_before=next_before)

    async def count(
        self, project_id: int, run_id: int | None, *, where: Expression | None, limit_s: float = MAX_LIMIT_S
    ) -> RolloutCounts:
        """Counts rollouts that `where` selects, newest first, until all are counted or the time limit has passed."""
        selected = Selected(project_id=project_id, run_id=run_id, where=where)
        lowest, upper = selected.id_bounds()
        pace = Pace(self._clock, limit_s=limit_s, most=self._window_rows)
        counts: Counter[tuple[RolloutState, FailureKind]] = Counter()
        while True:
            lower = await self._windows.end(selected, upper, lowest, rows=pace.rows)
            rows = await self._windows.read(selected, upper, lower or lowest, pace.rows, within="count_listed")
            for row in rows:
                counts[RolloutState(row["state"]), FailureKind(row["failure_kind"])] += row["count"]
            if lower is None or pace.is_over():
                return RolloutCounts(parts=counts, has_more=lower is not None)
            upper = lower

    async def _page(
        self, selected: Selected, before: UUID | None, limit: int, limit_s: float, *, within: str = ""
    ) -> tuple[list[asyncpg.Record], UUID | None]:
        """Returns the rows of a page, and the id below which the next one begins; None at the end."""
        lowest, highest = selected.id_bounds()
        upper = highest if before is None else min(before, highest)
        pace = Pace(self._clock, limit_s=limit_s, most=self._window_rows)
        found: list[asyncpg.Record] = []
        while True:
            lower = None
            if selected.where is not None:
                lower = await self._windows.end(selected, upper, lowest, rows=pace.rows)
            wanted = limit + 1 - len(found)
            found += await self._windows.read(selected, upper, lower or lowest, wanted, within=within)
            if len(found) > limit:
                return found[:limit], found[limit - 1]["id"]
            if lower is None:
                return found, None
            upper = lower
            if pace.is_over():
                return found, upper

    async def sorted_page(
        self,
        project_id: int,
        run_id: int | None,
        *,
        where: Expression | None,
        order: Sequence[SortKey],
        after: Place | None,
        limit: int,
        limit_s: float = MAX_LIMIT_S,
    ) -> SortedPage:
        """Returns rollouts that `where` selects, in an order, after a place in it.

        Raises:
            ArgumentInvalid: If the order has no index, and there are more rollouts than may be sorted.
        """
        pace = Pace(self._clock, limit_s=limit_s, most=self._window_rows)
        selected = Selected(project_id=project_id, run_id=run_id, where=where)
        lowest, highest = selected.id_bounds()
        has_index = len(order) == 1 and order[0].field in WALKED
        most = min(self._sorted_at_once, self._max_sorted) if has_index else self._max_sorted
        if await self._windows.end(selected, highest, lowest, rows=most + 1):
            if has_index:
                return await self._walked(selected, order[0], after, limit, pace)
            text = (
                f"would sort more than {self._max_sorted} rollouts: order by one of {', '.join(WALKED)} alone, or restrict "
                "the list by a training run, by bounds of create_time or to FAILED rollouts"
            )
            raise ArgumentInvalid("The list is too long.", violations=[Violation(field="order_by", description=text)])
        rows = await self._windows.read(selected, highest, lowest, limit + 1, order=order, after=after)
        views = await self._views(selected, rows)
        more = len(views) > limit
        return SortedPage(views=views[:limit], next_after=Place.of(views[limit - 1], order) if more else None)

    async def _walked(
        self, selected: Selected, key: SortKey, after: Place | None, limit: int, pace: Pace
    ) -> SortedPage:
        """Returns a page along the index of a figure, and then of the rollouts that have none, newest first."""
        place = _first_place(selected, key) if after is None else after
        least, most = value_bounds(selected.where, key.field)
        views: list[RolloutView] = []
        while (value := _number(place)) is not None:
            places = await self._windows.places(selected, key, value, place.rollout_id, pace.rows)
            rows = await self._windows.of_ids(selected, [one for _, one in places], limit + 1 - len(views))
            views += await self._views(selected, rows)
            if len(views) > limit:
                return SortedPage(views=views[:limit], next_after=Place.of(views[limit - 1], [key]))
            if len(places) < pace.rows:
                place = Place(values=(None,), rollout_id=HIGHEST_ID)
                break
            value, rollout_id = places[-1]
            place = Place(values=(value,), rollout_id=rollout_id)
            if (least is not None and value < least) or (most is not None and value > most):
                return SortedPage(views=views, next_after=None)
            if pace.is_over():
                return SortedPage(views=views, next_after=place)
        if least is not None or most is not None:
            return SortedPage(views=views, next_after=None)
        where = both(selected.where, absent(key.field))
        unset = Selected(project_id=selected.project_id, run_id=selected.run_id, where=where)
        left = limit - len(views)
        rows, next_before = await self._page(unset, place.rollout_id, left, pace.left_s()) if left else ([], HIGHEST_ID)
        views += await self._views(selected, rows)
        next_after = None if next_before is None else Place(values=(None,), rollout_id=next_before)
        return SortedPage(views=views, next_after=next_after)

    async def _views(self, selected: Selected, rows: Sequence[asyncpg.Record]) -> list[RolloutView]:
        await self._projects.load([selected.project_id])
        return [view_of(row, self._projects) for row in rows]


def _first_place(selected: Selected, key: SortKey) -> Place:
    """Returns the place before the first rollout that may be selected."""
    least, most = value_bounds(selected.where, key.field)
    start = most if key.descending else least
    if start is None:
        start = WALKED[key.field] if key.descending else -WALKED[key.field]
    # Those of the bound itself come after the place: their ids are lower.
    return Place(values=(start,), rollout_id=HIGHEST_ID)


def _number(place: Place) -> float | None:
    """Returns the value of a place in the order of one figure."""
    (value,) = place.values
    assert value is None or isinstance(value, int | float)
    return value


class DeadLetterTable:
    """Finds dead rollouts that were not retried."""

    def __init__(self, database: Database, *, window_rows: int = WINDOW_ROWS) -> None:
        """Creates the reader; a statement reads at most `window_rows` rows."""
        self._database = database
        self._window_rows = window_rows

    async def retryable(
        self, project_id: int, run_id: int | None, *, where: Expression | None, limit: int
    ) -> list[DeadRollout]:
        """Returns the oldest dead rollouts selected by `where` that were not run again."""
        found: list[DeadRollout] = []
        lower: UUID | None = LOWEST_ID
        while lower is not None and len(found) < limit:
            row = await self._database.fetch_row("retryable_window", project_id, lower, self._window_rows - 1)
            upper = None if row is None else row["id"]
            arguments = (project_id, lower, upper or HIGHEST_ID, limit - len(found), run_id)
            condition, values = compiled(where, first=len(arguments) + 1)
            found += [
                DeadRollout(rollout_id=row["id"], size_bytes=row["size_bytes"])
                for row in await self._database.fetch_filtered(
                    "list_retryable_rollouts", condition, *arguments, *values
                )
            ]
            lower = upper
        return found
