"""The filter of a list as an expression tree, and the fields of `ListRollouts`.

Invariant: a tree holds only known fields, with operators and values that fit them. A comparison with an unset field is
false and its negation is true; no third truth value exists. Texts are searched without regard to the case of ASCII letters.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from fulmen_store.rollouts.transitions import FailureKind, RolloutState

__all__ = [
    "ROLLOUTS",
    "Comparison",
    "Conjunction",
    "Disjunction",
    "Expression",
    "Field",
    "Negation",
    "Operator",
    "Presence",
    "Schema",
    "Search",
    "Value",
    "absent",
    "both",
    "creation_bounds",
    "required_name",
    "requires_state",
    "states_filter",
    "value_bounds",
]


class Field(StrEnum):
    """A field of a rollout that can be compared."""

    NAME = "name"
    STATE = "state"
    FAILURE_KIND = "failure_kind"
    MODE = "mode"
    PRIORITY = "priority"
    GROUP_ID = "group_id"
    TASK_TYPE = "task_type"
    AGENT = "agent"
    TRAINING_RUN = "training_run"
    CREATE_TIME = "create_time"
    END_TIME = "end_time"
    ENDED_ATTEMPT_COUNT = "ended_attempt_count"
    REWARD = "reward"
    DURATION = "duration"
    PROMPT_TOKEN_COUNT = "prompt_token_count"  # noqa: S105  # A field's name.
    COMPLETION_TOKEN_COUNT = "completion_token_count"  # noqa: S105  # Likewise.
    TOKEN_COUNT = "token_count"  # noqa: S105  # Likewise.
    COST_MICROS = "cost_micros"
    METADATA = "metadata"
    REQUIRED_LABELS = "required_labels"
    RESOURCE_VERSIONS = "resource_versions"
    INPUT = "input"
    OUTPUT = "output"


class Operator(StrEnum):
    """A comparison operator."""

    EQUAL = "="
    NOT_EQUAL = "!="
    LESS = "<"
    LESS_OR_EQUAL = "<="
    GREATER = ">"
    GREATER_OR_EQUAL = ">="


HAS: Final = ":"
"""The operator before a text that is searched, and before the `*` that stands for any value."""

Value = int | float | str | datetime.datetime

_UNORDERED: Final = frozenset({Operator.EQUAL, Operator.NOT_EQUAL})


@dataclass(frozen=True, slots=True, kw_only=True)
class Schema:
    """The fields that the filter of a list may compare.

    Attributes:
        types: Their types in PostgreSQL.
        words: Numbers by word, of fields that are written as words.
        durations: Fields that are written as seconds with an s behind them.
        maps: Fields of which the value of one key is compared, `FIELD.KEY`; stored as bytes.
        names: Fields that are compared with the name of a rollout, or its beginning.
        texts: Fields that are searched.
    """

    types: Mapping[str, str]
    words: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    durations: frozenset[str] = frozenset()
    maps: frozenset[str] = frozenset()
    names: frozenset[str] = frozenset()
    texts: frozenset[str] = frozenset()

    def find(self, text: str) -> str | None:
        """Returns the field of this name; None if there is none."""
        return next((each for each in self.types if each == text), None)

    @property
    def shown(self) -> str:
        """Its fields as they are written."""
        return ", ".join(f"{name}.KEY" if name in self.maps else name for name in self.types)

    def operators_of(self, name: str) -> frozenset[Operator]:
        """Returns the operators that a field can be compared with: none if it is searched."""
        if name in self.texts:
            return frozenset()
        is_unordered = name in self.words or name in self.maps or self.types[name] == "text"
        return _UNORDERED if is_unordered else frozenset(Operator)


ROLLOUTS: Final = Schema(
    types={
        Field.NAME: "text",
        Field.STATE: "int",
        Field.FAILURE_KIND: "int",
        Field.MODE: "int",
        Field.PRIORITY: "int",
        Field.GROUP_ID: "text",
        Field.TASK_TYPE: "text",
        Field.AGENT: "text",
        Field.TRAINING_RUN: "text",
        Field.CREATE_TIME: "timestamptz",
        Field.END_TIME: "timestamptz",
        Field.ENDED_ATTEMPT_COUNT: "int",
        Field.REWARD: "float8",
        Field.DURATION: "float8",
        Field.PROMPT_TOKEN_COUNT: "bigint",
        Field.COMPLETION_TOKEN_COUNT: "bigint",
        Field.TOKEN_COUNT: "bigint",
        Field.COST_MICROS: "bigint",
        Field.METADATA: "bytea",
        Field.REQUIRED_LABELS: "bytea",
        Field.RESOURCE_VERSIONS: "bytea",
        Field.INPUT: "bytea",
        Field.OUTPUT: "bytea",
    },
    words={
        Field.STATE: {state.name: state.value for state in RolloutState},
        Field.FAILURE_KIND: {kind.name: kind.value for kind in FailureKind if kind} | {"UNSPECIFIED": 0},
        Field.MODE: {"TRAIN": 1, "VALIDATION": 2, "TEST": 3},
    },
    durations=frozenset({Field.DURATION}),
    maps=frozenset({Field.METADATA, Field.REQUIRED_LABELS, Field.RESOURCE_VERSIONS}),
    names=frozenset({Field.NAME}),
    texts=frozenset({Field.INPUT, Field.OUTPUT}),
)
"""Fields of a rollout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A comparison of a field with a value; enum values are numbers, durations seconds, names UUIDs or their beginning.

    Of a map, the value of `key` is compared.
    """

    field: str
    key: str = ""
    operator: Operator
    value: Value


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """True if a text is part of a field, which is bytes; false if the field is unset."""

    field: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Presence:
    """True if a field, or the key of a map, is set; of a text or word, if it is not the empty one."""

    field: str
    key: str = ""


@dataclass(frozen=True, slots=True)
class Negation:
    """True if its operand is false."""

    operand: Expression


@dataclass(frozen=True, slots=True)
class Conjunction:
    """True if all of its operands are; it has at least one."""

    operands: tuple[Expression, ...]


@dataclass(frozen=True, slots=True)
class Disjunction:
    """True if any of its operands is; it has at least one."""

    operands: tuple[Expression, ...]


Expression = Comparison | Search | Presence | Negation | Conjunction | Disjunction


def states_filter(states: frozenset[int]) -> Expression | None:
    """Returns an expression that selects rollouts in one of these states; None for no states."""
    if not states:
        return None
    return Disjunction(
        tuple(Comparison(field=Field.STATE, operator=Operator.EQUAL, value=state) for state in sorted(states))
    )


def both(left: Expression | None, right: Expression | None) -> Expression | None:
    """Combines two filters; None selects everything."""
    if left is None or right is None:
        return left or right
    return Conjunction((left, right))


def absent(field: Field) -> Expression:
    """Returns the expression that a field is unset."""
    return Negation(Presence(field=field))


def requires_state(expression: Expression | None, state: RolloutState) -> bool:
    """Returns True if the top-level conjunction requires this state."""
    wanted = Comparison(field=Field.STATE, operator=Operator.EQUAL, value=state.value)
    return any(
        one == wanted or (isinstance(one, Disjunction) and one.operands == (wanted,)) for one in _required(expression)
    )


def required_name(expression: Expression | None) -> str:
    """Returns the longest beginning of a UUID that the top-level conjunction requires; empty if it requires none."""
    names = [
        str(one.value)
        for one in _required(expression)
        if isinstance(one, Comparison) and one.field is Field.NAME and one.operator is Operator.EQUAL
    ]
    return max(names, key=len, default="")


def creation_bounds(expression: Expression | None) -> tuple[datetime.datetime | None, datetime.datetime | None]:
    """Returns the bounds of the creation time that the top-level conjunction requires; None if unbounded."""
    earliest: datetime.datetime | None = None
    latest: datetime.datetime | None = None
    for one in _required(expression):
        if not isinstance(one, Comparison) or one.field is not Field.CREATE_TIME:
            continue
        assert isinstance(one.value, datetime.datetime)
        if one.operator in (Operator.EQUAL, Operator.GREATER, Operator.GREATER_OR_EQUAL):
            earliest = one.value if earliest is None else max(earliest, one.value)
        if one.operator in (Operator.EQUAL, Operator.LESS, Operator.LESS_OR_EQUAL):
            latest = one.value if latest is None else min(latest, one.value)
    return earliest, latest


def value_bounds(expression: Expression | None, field: Field) -> tuple[float | None, float | None]:
    """Returns the bounds of a number that the top-level conjunction requires, both inclusive; None if unbounded."""
    least: float | None = None
    most: float | None = None
    for one in _required(expression):
        if not isinstance(one, Comparison) or one.field is not field:
            continue
        assert isinstance(one.value, int | float)
        if one.operator in (Operator.EQUAL, Operator.GREATER, Operator.GREATER_OR_EQUAL):
            least = one.value if least is None else max(least, one.value)
        if one.operator in (Operator.EQUAL, Operator.LESS, Operator.LESS_OR_EQUAL):
            most = one.value if most is None else min(most, one.value)
    return least, most


def _required(expression: Expression | None) -> list[Expression]:
    """Returns expressions all of which must be true."""
    if expression is None:
        return []
    if isinstance(expression, Conjunction):
        return [one for operand in expression.operands for one in _required(operand)]
    return [expression]
