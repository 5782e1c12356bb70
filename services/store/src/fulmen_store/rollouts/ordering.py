"""The order of `ListRollouts`: its fields, and a rollout's place in it.

Invariant: an order is total. Unset fields come last; rollouts that are equal in every field are ordered newest first.
"""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from types import MappingProxyType
from typing import Final
from uuid import UUID

from fulmen.errors import ArgumentInvalid, PageTokenInvalid, Violation
from fulmen_store.rollouts.filter import Field, Value
from fulmen_store.rollouts.records import RolloutView

__all__ = ["SORTED_FIELDS", "Place", "SortKey", "parse_order"]

MAX_SHOWN: Final = 40
MAX_INTEGER: Final = 2**63 - 1
_TIMES: Final = frozenset({Field.CREATE_TIME, Field.END_TIME})
_VALUES: Final[Mapping[Field, Callable[[RolloutView], Value | None]]] = MappingProxyType(
    {
        Field.PRIORITY: attrgetter("priority"),
        Field.CREATE_TIME: attrgetter("created_at"),
        Field.END_TIME: attrgetter("ended_at"),
        Field.REWARD: attrgetter("reward"),
        Field.DURATION: attrgetter("duration_s"),
        Field.PROMPT_TOKEN_COUNT: attrgetter("prompt_token_count"),
        Field.COMPLETION_TOKEN_COUNT: attrgetter("completion_token_count"),
        Field.TOKEN_COUNT: attrgetter("token_count"),
        Field.COST_MICROS: attrgetter("cost_micros"),
    }
)

SORTED_FIELDS: Final = tuple(_VALUES)
"""Fields that a list can be ordered by. To count attempts would take most of the time of a sort."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SortKey:
    """One field of an order."""

    field: Field
    descending: bool = False


def parse_order(text: str) -> tuple[SortKey, ...]:
    """Decodes an order: fields joined by commas, each with `desc` or `asc` behind it or neither; empty if there is none.

    Raises:
        ArgumentInvalid: With every problem, each with the position of its character, from 1.
    """
    keys: list[SortKey] = []
    problems: list[tuple[int, str]] = []
    start = 0
    while text.strip() and start <= len(text):
        part = text[start:].partition(",")[0]
        words = part.split()
        position = start + len(part) - len(part.lstrip()) + 1
        problem = _problem(words, known={key.field for key in keys})
        if problem:
            problems.append((position, problem))
        else:
            keys.append(SortKey(field=Field(words[0]), descending=words[1:] == ["desc"]))
        start += len(part) + 1
    if problems:
        raise ArgumentInvalid(
            "The order is malformed.",
            violations=[
                Violation(field="order_by", description=f"at character {position}: {problem}")
                for position, problem in problems
            ],
        )
    return tuple(keys)


def _problem(words: Sequence[str], *, known: set[Field]) -> str:
    if not words:
        return "expected a field"
    name = words[0] if len(words[0]) <= MAX_SHOWN else f"{words[0][:MAX_SHOWN]}..."
    if words[0] not in SORTED_FIELDS:
        return f"`{name}` is not one of {', '.join(SORTED_FIELDS)}"
    if words[0] in known:
        return f"{name} is named twice"
    if words[1:] not in ([], ["asc"], ["desc"]):
        return f"only `asc` or `desc` may follow {name}"
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The place of a rollout in an order: its values of the fields, and its id."""

    values: tuple[Value | None, ...]
    rollout_id: UUID

    @classmethod
    def of(cls, view: RolloutView, order: Sequence[SortKey]) -> Place:
        """Returns the place of a rollout."""
        return cls(values=tuple(_VALUES[key.field](view) for key in order), rollout_id=view.rollout_id)

    def encode(self) -> bytes:
        """Encodes it for a page token."""
        values = [one.isoformat() if isinstance(one, datetime.datetime) else one for one in self.values]
        return json.dumps([self.rollout_id.hex, *values], separators=(",", ":")).encode()

    @classmethod
    def decode(cls, packed: bytes, order: Sequence[SortKey]) -> Place:
        """Decodes the place in a page token of this order.

        Raises:
            PageTokenInvalid: If it is malformed.
        """
        try:
            rollout_id, *values = json.loads(packed)
            pairs = zip(values, order, strict=True)
            return cls(values=tuple(_read(value, key.field) for value, key in pairs), rollout_id=UUID(rollout_id))
        except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
            raise PageTokenInvalid("The page token is malformed.") from None


def _read(value: object, field: Field) -> Value | None:
    """Returns a decoded value of a field.

    Raises:
        ValueError: If the field has no such value.
    """
    match value:
        case None:
            return None
        case str() if field in _TIMES:
            moment = datetime.datetime.fromisoformat(value)
            if moment.tzinfo is not None:
                return moment
        case bool():
            pass
        case float() | int() if field in (Field.REWARD, Field.DURATION) and math.isfinite(value):
            return float(value)
        case int() if abs(value) <= MAX_INTEGER and field not in _TIMES:
            return value
    raise ValueError(f"{field} has no value {value!r:.40}")
