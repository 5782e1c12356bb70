"""The store's SQL, by name: every statement lives in a `.sql` file beside its table, under a line `-- name: ...`.

Expressions for filters live in `rollouts/fragments/*.sql` and `calls/fragments/*.sql`, in the same form.

A table's columns are listed once, with their types, under a line `-- columns: NAME`. Statements refer to one or more
lists, joined by `+`: `{NAME}` stands for the names, `{x.NAME}` for the names qualified by x, and `{NAME[n]}` for array
parameters from `$n` on, as `unnest` takes them. `arguments` makes the arrays from records with attributes of these names.
In `{NAME[n text]}` arrays of integers are texts, as `arguments` makes them with `as_text`: the driver encodes these in a third of
the time.

`true /* days */` stands where a statement reads `span_chunk q`: `of_days` puts the days of its rollouts there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib import resources
from operator import attrgetter
from typing import Final
from uuid import UUID

from fulmen_store.database.days import days_condition

__all__ = ["CALL_FRAGMENTS", "FRAGMENTS", "SQL", "Fragments", "arguments", "filtered", "is_by_day", "of_days"]

_MARK: Final = "-- name: "
_FILTER_MARK: Final = "true /* filter */"
_DAYS_MARK: Final = "true /* days */"
_ORDER: Final = re.compile(r"order by [^\n]* /\* order \*/")
_LIST: Final = re.compile(r"select [^\n]* /\* list \*/")
_COLUMNS: Final = re.compile(r"^-- columns: (\w+)\n((?:--   .*\n)+)", re.M)
_INTEGERS: Final = frozenset({"smallint", "int", "bigint"})
_REFERENCE: Final = re.compile(r"\{(?:(\w+)\.)?([a-z_]+(?:\+[a-z_]+)*)(?:\[(\d+)( text)?\])?\}")


@cache
def _load(*folders: str) -> Mapping[str, str]:
    package = resources.files("fulmen_store")
    files = [file for folder in folders for file in package.joinpath(folder).iterdir() if file.name.endswith(".sql")]
    found: dict[str, str] = {}
    for file in sorted(files, key=lambda entry: entry.name):
        text = file.read_text(encoding="utf-8")
        for name, statement in _statements(_expanded(_COLUMNS.sub("", text), _columns(text))):
            if name in found:
                raise ValueError(f"two statements are called {name}")
            found[name] = statement
    return found


def _columns(text: str) -> Mapping[str, Sequence[tuple[str, str]]]:
    """Returns the listed columns of a file, each with its type, by list."""
    lists = {}
    for match in _COLUMNS.finditer(text):
        entries = match[2].replace("--", "").replace("\n", " ").split(",")
        lists[match[1]] = [(entry.split()[0], entry.split()[1]) for entry in entries]
    return lists


def _expanded(text: str, lists: Mapping[str, Sequence[tuple[str, str]]]) -> str:
    """Replaces the references to lists of columns."""

    def expand(match: re.Match[str]) -> str:
        qualifier, names, first, text = match.groups()
        parts = names.split("+")
        if any(name not in lists for name in parts):
            return match[0]
        columns = [column for name in parts for column in lists[name]]
        if first is not None:
            return ", ".join(
                f"${number}{'::text' if text and kind in _INTEGERS else ''}::{kind}[]"
                for number, (_, kind) in enumerate(columns, int(first))
            )
        prefix = f"{qualifier}." if qualifier else ""
        return ", ".join(prefix + name for name, _ in columns)

    return _REFERENCE.sub(expand, text)


@cache
def _getters(file: str, names: str) -> Sequence[tuple[Callable[[object], object], bool]]:
    """Returns what reads each listed column from a record, and whether it is an integer."""
    lists = _columns(resources.files("fulmen_store").joinpath(file).read_text(encoding="utf-8"))
    listed = [column for name in names.split("+") for column in lists[name]]
    return [(attrgetter(column), kind in _INTEGERS) for column, kind in listed]


def arguments(file: str, names: str, records: Sequence[object], *, as_text: bool = False) -> list[Sequence[object]]:
    """Returns one array per listed column, with the attribute of that name of each record.

    A column of nulls only is an empty array, which `unnest` pads with nulls.

    Args:
        file: File of the lists.
        names: Lists, joined by `+`.
        records: What the rows are made from.
        as_text: Whether arrays of integers are texts, for `{NAME[n text]}`.
    """
    arrays: list[Sequence[object]] = []
    for getter, is_integer in _getters(file, names):
        values = list(map(getter, records))
        if values.count(None) == len(values):
            values = []
        arrays.append(_written(values) if as_text and is_integer else values)
    return arrays


def _written(values: list[object]) -> str:
    """Writes an array of integers as PostgreSQL reads it."""
    return f"{{{str(values)[1:-1].replace('None', 'null')}}}"


def _statements(text: str) -> Iterator[tuple[str, str]]:
    for block in text.split(f"\n{_MARK}" if not text.startswith(_MARK) else _MARK)[1:]:
        for part in block.split(f"\n{_MARK}"):
            name, _, statement = part.partition("\n")
            yield name.strip(), statement.strip().rstrip(";")


class Fragments:
    """Looks up statements by name."""

    def __init__(self, *folders: str) -> None:
        self._folders = folders

    def __getitem__(self, name: str) -> str:
        return _load(*self._folders)[name]

    def items(self) -> Iterator[tuple[str, str]]:
        """Returns every statement with its name."""
        return iter(_load(*self._folders).items())


SQL: Final = Fragments(
    "annotations", "audit", "calls", "database", "effects", "leases", "projects", "proxies", "replicas", "resources", "retention",
    "rollouts", "run_history", "run_leases", "runners", "schedules", "scheduling", "sealed_secrets", "segments", "spans",
    "usage",
)  # fmt: skip
FRAGMENTS: Final = Fragments("rollouts/fragments")
CALL_FRAGMENTS: Final = Fragments("calls/fragments")


def filtered(name: str, condition: str, order: str = "", within: str = "") -> str:
    """Returns a named statement with a condition, made of fragments only, in place of its `/* filter */`.

    An order, made likewise, takes the place of the one before its `/* order */`. The whole takes the place of the list
    before the `/* list */` of the statement `within`.
    """
    before, mark, after = SQL[name].partition(_FILTER_MARK)
    if not mark:
        raise KeyError(f"statement {name} accepts no filter")
    if order:
        after, count = _ORDER.subn(lambda _: f"order by {order}", after)
        if count != 1:
            raise KeyError(f"statement {name} accepts no order")
    listed = f"{before}{condition}{after}"
    return _LIST.sub(lambda _: listed, SQL[within]) if within else listed


@cache
def is_by_day(name: str) -> bool:
    """Returns whether a named statement reads the partitions of days."""
    return _DAYS_MARK in SQL[name]


def of_days(name: str, rollout_ids: Iterable[UUID]) -> str:
    """Returns a named statement that reads the days of these rollouts alone, in place of its `/* days */`."""
    if not is_by_day(name):
        raise KeyError(f"statement {name} does not read by day")
    return SQL[name].replace(_DAYS_MARK, days_condition(rollout_ids))
