"""Lists of rollouts in PostgreSQL, in bounded time even if a filter selects few of them.

A list scans an index by id in windows of rows until the page is full, the rows end or its time limit has passed. A page
may therefore be short, or even empty, although more follow (AIP-158). A list in another order sorts all of its rows for
each page, since an index per field would cost every completion; it has a limit of rows instead.
"""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, assert_never
from uuid import UUID

import asyncpg

from fulmen.errors import ArgumentInvalid, Violation
from fulmen_store.clock import Clock
from fulmen_store.database.database import Database
from fulmen_store.database.days import first_id
from fulmen_store.database.queries import FRAGMENTS, Fragments
from fulmen_store.projects.names import ProjectNames
from fulmen_store.rollouts.filter import (
    ROLLOUTS,
    Comparison,
    Conjunction,
    Disjunction,
    Expression,
    Negation,
    Operator,
    Schema,
    Value,
    creation_bounds,
    required_name,
    requires_state,
)
from fulmen_store.rollouts.ordering import Place, SortKey
from fulmen_store.rollouts.records import DeadRollout, RolloutView
from fulmen_store.rollouts.table import view_of
from fulmen_store.rollouts.transitions import FailureKind, RolloutState

__all__ = [
    "DeadLetterTable",
    "ListedIds",
    "ListedPage",
    "RolloutCounts",
    "RolloutLists",
    "SortedPage",
    "compiled",
    "order_sql",
]

WINDOW_ROWS: Final = 5000
PAGE_LIMIT_S: Final = 2.0
MAX_SORTED: Final = 100_000
LOWEST_ID: Final = UUID(int=0)
HIGHEST_ID: Final = UUID(int=2**128 - 1)
# A supplied id may hold a time up to an hour before its creation and five minutes after it; clocks differ a little more.
ID_BEFORE_CREATION: Final = datetime.timedelta(hours=1, minutes=10)
ID_AFTER_CREATION: Final = datetime.timedelta(minutes=15)
_DIGITS: Final = 32


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Selected:
    """The rollouts of a list: of a project, or of one of its training runs, that `where` selects."""

    project_id: int
    run_id: int | None
    where: Expression | None

    @property
    def is_dead(self) -> bool:
        """Whether all of them have failed."""
        return self.where is not None and requires_state(self.where, RolloutState.FAILED)


class RolloutLists:
    """Reads lists of rollouts."""

    def __init__(
        self,
        database: Database,
        projects: ProjectNames,
        *,
        window_rows: int = WINDOW_ROWS,
        max_sorted: int = MAX_SORTED,
        clock: Clock | None = None,
    ) -> None:
        """Creates the reader; a statement reads at most `window_rows` rows, or sorts at most `max_sorted`."""
        self._database = database
        self._projects = projects
        self._window_rows = window_rows
        self._max_sorted = max_sorted
        self._clock = (clock or Clock()).monotonic_s

    async def page(
        self,
        project_id: int,
        run_id: int | None,
        *,
        where: Expression | None,
        before: UUID | None,
        limit: int,
        limit_s: float = PAGE_LIMIT_S,
    ) -> ListedPage:
        """Returns rollouts that `where` selects, newest first, with ids below `before`."""
        selected = _Selected(project_id=project_id, run_id=run_id, where=where)
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
        selected = _Selected(project_id=project_id, run_id=run_id, where=where)
        rows, next_before = await self._page(selected, before, limit, PAGE_LIMIT_S, within="ids_listed")
        return ListedIds(ids=[row["id"] for row in rows], next_before=next_before)

    async def count(
        self, project_id: int, run_id: int | None, *, where: Expression | None, limit_s: float = PAGE_LIMIT_S
    ) -> RolloutCounts:
        """Counts rollouts that `where` selects, newest first, until all are counted or the time limit has passed."""
        selected = _Selected(project_id=project_id, run_id=run_id, where=where)
        lowest, upper = _id_bounds(where)
        until = self._clock() + limit_s
        counts: Counter[tuple[RolloutState, FailureKind]] = Counter()
        while True:
            lower = await self._window_end(selected, upper, lowest, rows=self._window_rows)
            rows = await self._window(selected, upper, lower or lowest, self._window_rows, within="count_listed")
            for row in rows:
                counts[RolloutState(row["state"]), FailureKind(row["failure_kind"])] += row["count"]
            if lower is None or self._clock() >= until:
                return RolloutCounts(parts=counts, has_more=lower is not None)
            upper = lower

    async def _page(
        self, selected: _Selected, before: UUID | None, limit: int, limit_s: float, *, within: str = ""
    ) -> tuple[list[asyncpg.Record], UUID | None]:
        """Returns the rows of a page, and the id below which the next one begins; None at the end."""
        lowest, highest = _id_bounds(selected.where)
        upper = highest if before is None else min(before, highest)
        until = self._clock() + limit_s
        found: list[asyncpg.Record] = []
        while True:
            lower = None
            if selected.where is not None:
                lower = await self._window_end(selected, upper, lowest, rows=self._window_rows)
            wanted = limit + 1 - len(found)
            found += await self._window(selected, upper, lower or lowest, wanted, within=within)
            if len(found) > limit:
                return found[:limit], found[limit - 1]["id"]
            if lower is None:
                return found, None
            upper = lower
            if self._clock() >= until:
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
    ) -> SortedPage:
        """Returns rollouts that `where` selects, in an order, after a place in it.

        Raises:
            ArgumentInvalid: If there are more rollouts than may be sorted.
        """
        selected = _Selected(project_id=project_id, run_id=run_id, where=where)
        lowest, highest = _id_bounds(where)
        if await self._window_end(selected, highest, lowest, rows=self._max_sorted + 1):
            text = (
                f"would sort more than {self._max_sorted} rollouts: restrict the list by a training run, by bounds of "
                "create_time or to FAILED rollouts"
            )
            raise ArgumentInvalid("The list is too long.", violations=[Violation(field="order_by", description=text)])
        views = await self._views(
            selected, await self._window(selected, highest, lowest, limit + 1, order=order, after=after)
        )
        more = len(views) > limit
        return SortedPage(views=views[:limit], next_after=Place.of(views[limit - 1], order) if more else None)

    async def _window_end(self, selected: _Selected, upper: UUID, lowest: UUID, *, rows: int) -> UUID | None:
        """Returns the id of the last of so many rows below `upper`; None if there are fewer."""
        arguments: list[object] = [selected.project_id, upper, lowest, rows - 1]
        if selected.is_dead:
            row = await self._database.fetch_row("dead_window", *arguments)
        elif selected.run_id is None:
            row = await self._database.fetch_row("project_window", *arguments)
        else:
            row = await self._database.fetch_row("run_window", *arguments, selected.run_id)
        return None if row is None else row["id"]

    async def _window(
        self,
        selected: _Selected,
        upper: UUID,
        lower: UUID,
        limit: int,
        *,
        order: Sequence[SortKey] = (),
        after: Place | None = None,
        within: str = "",
    ) -> list[asyncpg.Record]:
        arguments: list[object] = [selected.project_id, upper, lower, limit]
        if selected.is_dead:
            name, arguments = "list_dead_rollouts", [*arguments, selected.run_id]
        elif selected.run_id is None:
            name = "list_project_rollouts"
        else:
            name, arguments = "list_run_rollouts", [*arguments, selected.run_id]
        condition, values = compiled(selected.where, first=len(arguments) + 1)
        if after is not None:
            condition += f" and {_is_after(after, order, len(arguments) + 1, values)}"
        return await self._database.fetch_filtered(
            name, condition, *arguments, *values, order=order_sql(order), within=within
        )

    async def _views(self, selected: _Selected, rows: Sequence[asyncpg.Record]) -> list[RolloutView]:
        await self._projects.load([selected.project_id])
        return [view_of(row, self._projects) for row in rows]


def _id_bounds(where: Expression | None) -> tuple[UUID, UUID]:
    """Returns the inclusive lower and the exclusive upper bound of the selected ids."""
    earliest, latest = creation_bounds(where)
    low = LOWEST_ID if earliest is None else _id_at(earliest, -ID_BEFORE_CREATION)
    high = HIGHEST_ID if latest is None else _id_at(latest, ID_AFTER_CREATION)
    if name := required_name(where).replace("-", ""):
        low = max(low, UUID(name.ljust(_DIGITS, "0")))
        # The upper bound is exclusive.
        high = min(high, UUID(int=min(int(name.ljust(_DIGITS, "f"), 16) + 1, HIGHEST_ID.int)))
    return low, high


def _id_at(moment: datetime.datetime, shift: datetime.timedelta) -> UUID:
    return first_id(round((moment.timestamp() + shift.total_seconds()) * 1000))


EVERYTHING: Final = "true"
# Where the key goes in the fragment of a map.
_KEY: Final = "''::bytea /* key */"


_OPERATORS: Final[Mapping[Operator, str]] = {
    Operator.EQUAL: "=",
    Operator.LESS: "<",
    Operator.LESS_OR_EQUAL: "<=",
    Operator.GREATER: ">",
    Operator.GREATER_OR_EQUAL: ">=",
}


def compiled(
    expression: Expression | None, *, first: int, schema: Schema = ROLLOUTS, fragments: Fragments = FRAGMENTS
) -> tuple[str, list[Value | UUID | bytes]]:
    """Returns the condition and the values of its parameters, numbered from `first`.

    Args:
        expression: The filter.
        first: Number of the first parameter.
        schema: The fields of the list.
        fragments: What they are in SQL.
    """
    if expression is None:
        return EVERYTHING, []
    values: list[Value | UUID | bytes] = []

    def condition(expression: Expression) -> str:
        match expression:
            case Comparison(operator=Operator.NOT_EQUAL):
                return f"(not {condition(replace(expression, operator=Operator.EQUAL))})"
            case Comparison():
                field = expression.field
                if field in schema.maps:
                    values.extend((expression.key.encode(), str(expression.value).encode()))
                    key, value = (f"${first + len(values) - back}::bytea" for back in (2, 1))
                    return f"coalesce({fragments[field].replace(_KEY, key)} = {value}, false)"
                values.append(expression.value)
                parameter = f"${first + len(values) - 1}::{schema.types[field]}"
                if field in schema.names:
                    return f"starts_with({fragments[field]}, {parameter})"
                # An unset field makes the comparison null, which is false here: a negation of it is then true.
                return f"coalesce(({fragments[field]}) {_OPERATORS[expression.operator]} {parameter}, false)"
            case Negation():
                return f"(not {condition(expression.operand)})"
            case Conjunction():
                return "(" + " and ".join(map(condition, expression.operands)) + ")"
            case Disjunction():
                return "(" + " or ".join(map(condition, expression.operands)) + ")"
            case _:
                assert_never(expression)

    return condition(expression), values


def order_sql(order: Sequence[SortKey]) -> str:
    """Returns the order in SQL; empty for the order of the statement."""
    keys = [f"({FRAGMENTS[key.field]}) {'desc' if key.descending else 'asc'} nulls last" for key in order]
    return ", ".join([*keys, "r.id desc"]) if keys else ""


def _is_after(place: Place, order: Sequence[SortKey], first: int, values: list[Value | UUID | bytes]) -> str:
    """Returns the condition that a rollout comes after a place; appends the values of its parameters."""

    def parameter(value: Value | UUID, kind: str) -> str:
        values.append(value)
        return f"${first + len(values) - 1}::{kind}"

    condition = f"r.id < {parameter(place.rollout_id, 'uuid')}"
    for key, value in reversed(list(zip(order, place.values, strict=True))):
        column = f"({FRAGMENTS[key.field]})"
        if value is None:
            condition = f"({column} is null and {condition})"
        else:
            own = parameter(value, ROLLOUTS.types[key.field])
            sign = "<" if key.descending else ">"
            condition = f"({column} {sign} {own} or {column} is null or ({column} = {own} and {condition}))"
    return condition


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
