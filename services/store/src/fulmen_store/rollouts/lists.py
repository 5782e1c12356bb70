"""Lists of rollouts in PostgreSQL, in bounded time even if a filter selects few of them.

A list scans an index by id in windows of rows until the page is full, the rows end or its time limit has passed. A page
may therefore be short, or even empty, although more follow (AIP-158). A list in another order sorts all of its rows for
each page, since an index per field would cost every completion; it has a limit of rows instead.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, assert_never
from uuid import UUID

import asyncpg

from fulmen.errors import ArgumentInvalid, Violation
from fulmen_store.clock import Clock
from fulmen_store.database.database import Database
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
from fulmen_store.rollouts.transitions import RolloutState

__all__ = [
    "DeadLetterTable",
    "ListedPage",
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
_RANDOM_BITS: Final = 80
_DIGITS: Final = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedPage:
    """One page, and the id below which the next one begins; None at the end."""

    views: list[RolloutView]
    next_before: UUID | None


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
        lowest, highest = _id_bounds(where)
        upper = highest if before is None else min(before, highest)
        until = self._clock() + limit_s
        found: list[RolloutView] = []
        while True:
            lower = None
            if where is not None:
                lower = await self._window_end(selected, upper, lowest, rows=self._window_rows)
            wanted = limit + 1 - len(found)
            found += await self._window(selected, upper, lower or lowest, wanted)
            if len(found) > limit:
                return ListedPage(views=found[:limit], next_before=found[limit - 1].rollout_id)
            if lower is None:
                return ListedPage(views=found, next_before=None)
            upper = lower
            if self._clock() >= until:
                return ListedPage(views=found, next_before=upper)

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
        views = await self._window(selected, highest, lowest, limit + 1, order=order, after=after)
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
    ) -> list[RolloutView]:
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
        rows: list[asyncpg.Record] = await self._database.fetch_filtered(
            name, condition, *arguments, *values, order=order_sql(order)
        )
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
    milliseconds = round((moment.timestamp() + shift.total_seconds()) * 1000)
    return UUID(int=min(max(milliseconds, 0), 2**48 - 1) << _RANDOM_BITS)


EVERYTHING: Final = "true"


_OPERATORS: Final[Mapping[Operator, str]] = {
    Operator.EQUAL: "=",
    Operator.LESS: "<",
    Operator.LESS_OR_EQUAL: "<=",
    Operator.GREATER: ">",
    Operator.GREATER_OR_EQUAL: ">=",
}


def compiled(
    expression: Expression | None, *, first: int, schema: Schema = ROLLOUTS, fragments: Fragments = FRAGMENTS
) -> tuple[str, list[Value | UUID]]:
    """Returns the condition and the values of its parameters, numbered from `first`.

    Args:
        expression: The filter.
        first: Number of the first parameter.
        schema: The fields of the list.
        fragments: What they are in SQL.
    """
    if expression is None:
        return EVERYTHING, []
    values: list[Value | UUID] = []

    def condition(expression: Expression) -> str:
        match expression:
            case Comparison(operator=Operator.NOT_EQUAL):
                equal = Comparison(field=expression.field, operator=Operator.EQUAL, value=expression.value)
                return f"(not {condition(equal)})"
            case Comparison():
                values.append(expression.value)
                parameter = f"${first + len(values) - 1}::{schema.types[expression.field]}"
                if expression.field in schema.names:
                    return f"starts_with({fragments[expression.field]}, {parameter})"
                # An unset field makes the comparison null, which is false here: a negation of it is then true.
                return f"coalesce(({fragments[expression.field]}) {_OPERATORS[expression.operator]} {parameter}, false)"
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


def _is_after(place: Place, order: Sequence[SortKey], first: int, values: list[Value | UUID]) -> str:
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
