"""Filters and orders of lists as SQL, made of the named fragments alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final, assert_never
from uuid import UUID

from fulmen_store.database.queries import FRAGMENTS, Fragments
from fulmen_store.rollouts.filter import (
    ROLLOUTS,
    Comparison,
    Conjunction,
    Disjunction,
    Expression,
    Negation,
    Operator,
    Presence,
    Schema,
    Search,
    Value,
)
from fulmen_store.rollouts.ordering import Place, SortKey

__all__ = ["compiled", "is_after", "order_sql"]

EVERYTHING: Final = "true"
# Where key, bytes and text go in the fragments of maps, of a stored message, and of searches.
_KEY: Final = "''::bytea /* key */"
_BYTES: Final = "''::bytea /* bytes */"
_TEXT: Final = "''::bytea /* text */"


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
    compiler = _Compiler(first, schema, fragments)
    return compiler.condition(expression), compiler.values


class _Compiler:
    """Writes conditions, and collects the values of their parameters."""

    def __init__(self, first: int, schema: Schema, fragments: Fragments) -> None:
        self.values: list[Value | UUID | bytes] = []
        self._first = first
        self._schema = schema
        self._fragments = fragments

    def condition(self, expression: Expression) -> str:
        """Returns the condition of an expression, which is never null."""
        match expression:
            case Comparison(operator=Operator.NOT_EQUAL):
                return f"(not {self.condition(replace(expression, operator=Operator.EQUAL))})"
            case Comparison():
                return self._comparison(expression)
            case Search():
                text = self._parameter(expression.text.encode().lower(), "bytea")
                return f"coalesce({self._fragments[f'{expression.field}_search'].replace(_TEXT, text)}, false)"
            case Presence():
                return self._presence(expression)
            case Negation():
                return f"(not {self.condition(expression.operand)})"
            case Conjunction():
                return "(" + " and ".join(map(self.condition, expression.operands)) + ")"
            case Disjunction():
                return "(" + " or ".join(map(self.condition, expression.operands)) + ")"
            case _:
                assert_never(expression)

    def _parameter(self, value: Value | bytes, kind: str) -> str:
        self.values.append(value)
        return f"${self._first + len(self.values) - 1}::{kind}"

    def _comparison(self, one: Comparison) -> str:
        found = self._fragments[one.field]
        if one.field in self._schema.maps:
            key = self._parameter(one.key.encode(), "bytea")
            value = self._parameter(str(one.value).encode(), "bytea")
            # Few messages hold the bytes of the value, and to look for them takes a tenth of the time of reading the map.
            held = self._fragments["request_holds"].replace(_BYTES, value)
            return f"coalesce(case when {held} then {found.replace(_KEY, key)} = {value} end, false)"
        value = self._parameter(one.value, self._schema.types[one.field])
        if one.field in self._schema.names:
            return f"starts_with({found}, {value})"
        # An unset field makes the comparison null, which is false here: a negation of it is then true.
        return f"coalesce(({found}) {_OPERATORS[one.operator]} {value}, false)"

    def _presence(self, one: Presence) -> str:
        found = f"({self._fragments[one.field]})"
        if one.field in self._schema.maps:
            found = found.replace(_KEY, self._parameter(one.key.encode(), "bytea"))
        elif one.field in self._schema.words:
            found = f"nullif({found}, 0)"
        elif self._schema.types[one.field] == "text":
            found = f"nullif({found}, '')"
        return f"({found} is not null)"


def order_sql(order: Sequence[SortKey]) -> str:
    """Returns the order in SQL; empty for the order of the statement."""
    keys = [f"({FRAGMENTS[key.field]}) {'desc' if key.descending else 'asc'} nulls last" for key in order]
    return ", ".join([*keys, "r.id desc"]) if keys else ""


def is_after(place: Place, order: Sequence[SortKey], first: int, values: list[Value | UUID | bytes]) -> str:
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
