"""Random filters, their text, and what they mean: the oracle of the store's filter tests."""

from __future__ import annotations

import datetime
import operator
from collections.abc import Callable, Mapping
from typing import Any

from hypothesis import strategies as st

from fulmen_store.rollouts.filter import (
    ROLLOUTS,
    Comparison,
    Conjunction,
    Disjunction,
    Expression,
    Field,
    Negation,
    Operator,
    Presence,
    Search,
    Value,
)
from fulmen_store.rollouts.ordering import SORTED_FIELDS, SortKey
from fulmen_store.rollouts.transitions import FailureKind, RolloutState

__all__ = [
    "AGENTS", "COMPARE", "COUNTS", "DURATIONS_S", "GROUPS", "KEYS", "MAPS", "MAP_VALUES", "MOMENTS", "REWARDS",
    "RUNS", "TASK_TYPES", "TEXTS", "expressions", "means", "orders", "written",
]  # fmt: skip

COMPARE: Mapping[Operator, Callable[[Any, Any], bool]] = {
    Operator.EQUAL: operator.eq,
    Operator.NOT_EQUAL: operator.ne,
    Operator.LESS: operator.lt,
    Operator.LESS_OR_EQUAL: operator.le,
    Operator.GREATER: operator.gt,
    Operator.GREATER_OR_EQUAL: operator.ge,
}
START = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
MOMENTS = [START + datetime.timedelta(minutes=minute) for minute in range(6)]
GROUPS = ["", "a", "A", 'q"\\uote', "AND", "größe"]
TASK_TYPES = ["", "short", "long"]
AGENTS = ["", "resources/agent.x/versions/1", "resources/agent.x/versions/2"]
RUNS = ["", "projects/default/trainingRuns/a", "projects/default/trainingRuns/b"]
TEXTS = ["", "Refund 303", "größe", "a\\b", "\0x", "re*fund"]
SEARCHED = ["refund", "REFUND 3", "303", "GRö", "\\", "\0X", "*", "zz"]
REWARDS = [-1.0, 0.0, 0.1, 0.30000000000000004, 1.0, 1e-300]
DURATIONS_S = [0.0, 0.125, 1.5, 90.0]
COUNTS = [0, 7, 512, 2**40]
# Ids of the first moments begin alike.
KEYS = ["team", "fulmen.retry_of", 'a "b"', "größe", "empty", "-"]
MAP_VALUES = ["", "a", "b", 'q"\\uote']
MAPS = {Field.METADATA: 15, Field.REQUIRED_LABELS: 13, Field.RESOURCE_VERSIONS: 10}
NAMES = ["", "0", "019b", "019b7", "019b76da-a", "019b76da-a800", "ffffffff-ffff-ffff-ffff-ffffffffffff"]
MODES = {1: "TRAIN", 2: "VALIDATION", 3: "TEST"}

VALUES: Mapping[Field, st.SearchStrategy[Value]] = {
    Field.NAME: st.sampled_from(NAMES),
    Field.STATE: st.sampled_from([state.value for state in RolloutState]),
    Field.FAILURE_KIND: st.sampled_from([kind.value for kind in FailureKind]),
    Field.MODE: st.sampled_from(list(MODES)),
    Field.PRIORITY: st.integers(-3, 3),
    Field.GROUP_ID: st.sampled_from(GROUPS),
    Field.TASK_TYPE: st.sampled_from(TASK_TYPES),
    Field.AGENT: st.sampled_from(AGENTS),
    Field.TRAINING_RUN: st.sampled_from(RUNS),
    Field.CREATE_TIME: st.sampled_from(MOMENTS),
    Field.END_TIME: st.sampled_from(MOMENTS),
    Field.ENDED_ATTEMPT_COUNT: st.integers(0, 3),
    Field.REWARD: st.sampled_from(REWARDS),
    Field.DURATION: st.sampled_from(DURATIONS_S),
    Field.PROMPT_TOKEN_COUNT: st.sampled_from(COUNTS),
    Field.COMPLETION_TOKEN_COUNT: st.sampled_from(COUNTS),
    Field.TOKEN_COUNT: st.sampled_from(COUNTS),
    Field.COST_MICROS: st.sampled_from(COUNTS),
} | dict.fromkeys(MAPS, st.sampled_from(MAP_VALUES))


@st.composite
def comparisons(draw: st.DrawFn) -> Expression:
    """Draws one comparison that the grammar allows, a search, or the question whether a field is set."""
    field = draw(st.sampled_from(list(Field)))
    if draw(st.integers(0, 5)) == 0:
        return Presence(field=field, key=draw(st.sampled_from(KEYS)) if field in MAPS else "")
    if field in ROLLOUTS.texts:
        return Search(field=field, text=draw(st.sampled_from(SEARCHED)))
    sign = draw(st.sampled_from(sorted(ROLLOUTS.operators_of(field))))
    key = draw(st.sampled_from(KEYS)) if field in MAPS else ""
    return Comparison(field=field, key=key, operator=sign, value=draw(VALUES[field]))


def expressions() -> st.SearchStrategy[Expression]:
    """Draws trees as the parser makes them: no negation of a negation, no operand that could be its parent's."""

    def extend(inner: st.SearchStrategy[Expression]) -> st.SearchStrategy[Expression]:
        several = st.lists(inner, min_size=2, max_size=3).map(tuple)
        return st.one_of(inner.map(Negation), several.map(Conjunction), several.map(Disjunction))

    return st.recursive(comparisons(), extend, max_leaves=6)


def orders() -> st.SearchStrategy[tuple[SortKey, ...]]:
    """Draws orders of one to four fields."""
    keys = st.builds(SortKey, field=st.sampled_from(SORTED_FIELDS), descending=st.booleans())
    return st.lists(keys, min_size=1, max_size=4, unique_by=lambda key: key.field).map(tuple)


def written(expression: Expression) -> str:
    """Writes a tree with every parenthesis."""
    match expression:
        case Comparison(field=field, key=key, operator=sign, value=value):
            return f"{field}{f'.{_quoted(key)}' if key else ''} {sign} {_value(Field(field), value)}"
        case Search(field=field, text=text):
            return f"{field}:{_quoted(text)}"
        case Presence(field=field, key=key):
            return f"{field}{f'.{_quoted(key)}' if key else ''}:*"
        case Negation(operand=operand):
            return f"NOT ({written(operand)})"
        case Conjunction(operands=operands):
            return " AND ".join(f"({written(operand)})" for operand in operands)
        case Disjunction(operands=operands):
            return " OR ".join(f"({written(operand)})" for operand in operands)


def means(expression: Expression, facts: Mapping[Field, Any]) -> bool:
    """True if a rollout with these facts is selected; a comparison with an unset fact is false."""
    match expression:
        case Comparison(field=Field.NAME, operator=sign, value=value):
            return str(facts[Field.NAME]).startswith(str(value)) is (sign is Operator.EQUAL)
        case Comparison(field=field, key=key, operator=sign, value=value) if key:
            return (facts[Field(field)].get(key) == value) is (sign is Operator.EQUAL)
        case Comparison(field=field, operator=Operator.NOT_EQUAL, value=value):
            return bool(facts[Field(field)] != value)
        case Comparison(field=field, operator=sign, value=value):
            fact = facts[Field(field)]
            return fact is not None and COMPARE[sign](fact, value)
        case Search(field=field, text=text):
            fact = facts[Field(field)]
            return fact is not None and text.encode().lower() in fact.lower()
        case Presence(field=field, key=key):
            fact = facts[Field(field)].get(key) if key else facts[Field(field)]
            # The number of no failure and an empty name stand for nothing; the value of a key may be empty.
            is_empty = fact == "" or (field is Field.FAILURE_KIND and fact == 0)
            return fact is not None and (bool(key) or not is_empty)
        case Negation(operand=operand):
            return not means(operand, facts)
        case Conjunction(operands=operands):
            return all(means(operand, facts) for operand in operands)
        case Disjunction(operands=operands):
            return any(means(operand, facts) for operand in operands)


def _value(field: Field, value: Value) -> str:
    match field:
        case Field.NAME:
            return f'"projects/default/rollouts/{value}{"" if len(str(value)) == 36 else "*"}"'
        case Field.STATE:
            return RolloutState(value).name  # type: ignore[arg-type]  # the value of an enum is its number
        case Field.FAILURE_KIND:
            return FailureKind(value).name if value else "UNSPECIFIED"  # type: ignore[arg-type]  # likewise
        case Field.MODE:
            return MODES[value]  # type: ignore[index]  # likewise
    if isinstance(value, datetime.datetime):
        return f'"{value.isoformat()}"'
    if isinstance(value, int | float):
        return f"{value}s" if field is Field.DURATION else str(value)
    return _quoted(value)


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
