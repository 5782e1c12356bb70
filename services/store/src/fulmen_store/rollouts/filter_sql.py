"""Turns a rollout filter into a SQL condition: fragments of `sql/fragments/rollout_filter.sql`, operators and numbers of
parameters. A caller's text only ever becomes a parameter's value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, assert_never

from fulmen_store.database.queries import FRAGMENTS
from fulmen_store.rollouts.filter import (
    Comparison,
    Conjunction,
    Disjunction,
    Expression,
    Field,
    Negation,
    Operator,
    Value,
)

__all__ = ["compiled"]

EVERYTHING: Final = "true"

_TYPES: Final[Mapping[Field, str]] = {
    Field.STATE: "int",
    Field.FAILURE_KIND: "int",
    Field.MODE: "int",
    Field.PRIORITY: "int",
    Field.GROUP_ID: "text",
    Field.TASK_TYPE: "text",
    Field.AGENT: "text",
    Field.CREATE_TIME: "timestamptz",
    Field.END_TIME: "timestamptz",
    Field.ENDED_ATTEMPT_COUNT: "int",
}
_OPERATORS: Final[Mapping[Operator, str]] = {
    Operator.EQUAL: "=",
    Operator.LESS: "<",
    Operator.LESS_OR_EQUAL: "<=",
    Operator.GREATER: ">",
    Operator.GREATER_OR_EQUAL: ">=",
}


def compiled(expression: Expression | None, *, first: int) -> tuple[str, list[Value]]:
    """Returns the condition and the values of its parameters, which are numbered from `first` on."""
    if expression is None:
        return EVERYTHING, []
    values: list[Value] = []
    return _condition(expression, first, values), values


def _condition(expression: Expression, first: int, values: list[Value]) -> str:
    match expression:
        case Comparison(operator=Operator.NOT_EQUAL):
            equal = Comparison(field=expression.field, operator=Operator.EQUAL, value=expression.value)
            return f"(not {_condition(equal, first, values)})"
        case Comparison():
            values.append(expression.value)
            parameter = f"${first + len(values) - 1}::{_TYPES[expression.field]}"
            # An unset field makes the comparison null, which is false here: a negation of it is then true.
            return f"coalesce(({FRAGMENTS[expression.field]}) {_OPERATORS[expression.operator]} {parameter}, false)"
        case Negation():
            return f"(not {_condition(expression.operand, first, values)})"
        case Conjunction():
            return "(" + " and ".join(_condition(operand, first, values) for operand in expression.operands) + ")"
        case Disjunction():
            return "(" + " or ".join(_condition(operand, first, values) for operand in expression.operands) + ")"
        case _:
            assert_never(expression)
