"""Facets of lists in PostgreSQL, of the newest rollouts that are selected."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from fulmen_store.clock import Clock
from fulmen_store.database.database import Database, Row
from fulmen_store.rollouts.facets import MAP_FIELDS, TRAITS, Facet, FacetCounter
from fulmen_store.rollouts.filter import Expression, Field
from fulmen_store.rollouts.windows import FIRST_ROWS, MAX_LIMIT_S, WINDOW_ROWS, ListWindows, Pace, Selected

__all__ = ["RolloutFacets"]

MAX_EXAMINED: Final = 10_000
# To read the maps of a rollout takes twenty times as long as its columns.
MAX_MAPS_EXAMINED: Final = 500
FIRST_MAPS: Final = 50
COLUMNS: Final = ("state", "failure_kind", "mode", "task_type", "agent", "run_id", "reward_place")


class RolloutFacets:
    """Reads facets."""

    def __init__(
        self,
        database: Database,
        *,
        window_rows: int = WINDOW_ROWS,
        max_examined: int = MAX_EXAMINED,
        max_maps_examined: int = MAX_MAPS_EXAMINED,
        clock: Clock | None = None,
    ) -> None:
        """Creates the reader; a facet covers at most this many rollouts, fewer for maps."""
        self._database = database
        self._windows = ListWindows(database)
        self._window_rows = window_rows
        self._max_examined = max_examined
        self._max_maps_examined = max_maps_examined
        self._clock = (clock or Clock()).monotonic_s

    async def facets(
        self,
        project_id: int,
        run_id: int | None,
        *,
        where: Expression | None,
        fields: Sequence[Field],
        limit_s: float = MAX_LIMIT_S,
    ) -> list[Facet]:
        """Returns the facets of these fields, of the rollouts that `where` selects."""
        selected = Selected(project_id=project_id, run_id=run_id, where=where)
        counters = {field: FacetCounter(field) for field in fields}
        found: dict[Field, Facet] = {}
        if any(field in TRAITS for field in fields):
            more = await self._count(selected, counters, "facets_listed", self._max_examined, limit_s)
            names = await self._names(counters)
            found |= {
                field: counter.facet(names=names.get(field, {}), has_more=more)
                for field, counter in counters.items()
                if field in TRAITS
            }
        if any(field in MAP_FIELDS.values() for field in fields):
            more = await self._count(selected, counters, "map_facets_listed", self._max_maps_examined, limit_s)
            found |= {
                field: counter.facet(names={}, has_more=more)
                for field, counter in counters.items()
                if field not in TRAITS
            }
        return [found[field] for field in fields]

    async def _count(
        self, selected: Selected, counters: Mapping[Field, FacetCounter], within: str, most: int, limit_s: float
    ) -> bool:
        """Adds up the values of the newest rollouts; returns whether there may be more than were examined."""
        add = _add_traits if within == "facets_listed" else _add_entries
        lowest, upper = selected.id_bounds()
        first = FIRST_ROWS if within == "facets_listed" else FIRST_MAPS
        pace = Pace(self._clock, limit_s=limit_s, most=min(self._window_rows, most), first=first)
        left = most
        while True:
            lower = await self._windows.end(selected, upper, lowest, rows=pace.rows)
            rows = await self._windows.read(selected, upper, lower or lowest, left, within=within)
            left -= add(rows, counters)
            if lower is None or left <= 0 or pace.is_over():
                return lower is not None or left <= 0
            upper = lower

    async def _names(self, counters: Mapping[Field, FacetCounter]) -> Mapping[Field, Mapping[int, str]]:
        """Returns the names behind the numbers that were counted."""

        def numbers(*fields: Field) -> list[int]:
            return [number for field in fields if field in counters for number in counters[field].numbers]

        interned, runs = numbers(Field.TASK_TYPE, Field.AGENT), numbers(Field.TRAINING_RUN)
        rows = await self._database.fetch("names_of_numbers", interned, runs) if interned or runs else []
        of_names = {row["id"]: row["name"] for row in rows if not row["is_run"]}
        of_runs = {row["id"]: row["name"] for row in rows if row["is_run"]}
        return {Field.TASK_TYPE: of_names, Field.AGENT: of_names, Field.TRAINING_RUN: of_runs}


def _add_traits(rows: Sequence[Row], counters: Mapping[Field, FacetCounter]) -> int:
    """Adds rows of `facets_listed`; returns the number of rollouts."""
    every = (1 << len(TRAITS)) - 1
    examined = 0
    for row in rows:
        place = len(TRAITS) - (every ^ row["others"]).bit_length()
        if place == 0:
            examined += row["count"]
        if TRAITS[place] in counters:
            counters[TRAITS[place]].add(row[COLUMNS[place]], row["count"])
    for field in counters.keys() & set(TRAITS):
        counters[field].examined += examined
    return examined


def _add_entries(rows: Sequence[Row], counters: Mapping[Field, FacetCounter]) -> int:
    """Adds rows of `map_facets_listed`, the first of which counts the rollouts; returns their number."""
    examined = 0
    for row in rows:
        field = MAP_FIELDS.get(row["field"])
        if field is None:
            examined += row["count"]
        elif field in counters and row["key"] and b"\0" not in row["key"] + row["value"]:
            counters[field].add(
                row["value"].decode(errors="replace"), row["count"], key=row["key"].decode(errors="replace")
            )
    for field in counters.keys() - set(TRAITS):
        counters[field].examined += examined
    return examined
