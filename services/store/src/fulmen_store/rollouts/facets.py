"""Facets of a list: numbers of its rollouts by each of their traits, of the newest ones alone if there are many.

Invariant: the filter of a value, joined to that of the list, selects what the value counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from fulmen_store.rollouts.filter import ROLLOUTS, Field

__all__ = ["FACETED_FIELDS", "MAP_FIELDS", "REWARD_FILTERS", "TRAITS", "Facet", "FacetCounter", "FacetValue"]

MAX_VALUES: Final = 20

TRAITS: Final = (
    Field.STATE,
    Field.FAILURE_KIND,
    Field.MODE,
    Field.TASK_TYPE,
    Field.AGENT,
    Field.TRAINING_RUN,
    Field.REWARD,
)
"""Traits of a rollout, in the order of the bits of `facets_listed`."""

MAP_FIELDS: Final[Mapping[int, Field]] = MappingProxyType(
    {10: Field.RESOURCE_VERSIONS, 13: Field.REQUIRED_LABELS, 15: Field.METADATA}
)
"""Maps by their numbers in the stored message."""

FACETED_FIELDS: Final = (*TRAITS, *MAP_FIELDS.values())
"""Fields that have a facet."""

REWARD_FILTERS: Final = (
    ("< 0", "reward < 0"),
    ("0", "reward = 0"),
    ("0 to 0.25", "reward > 0 AND reward < 0.25"),
    ("0.25 to 0.5", "reward >= 0.25 AND reward < 0.5"),
    ("0.5 to 0.75", "reward >= 0.5 AND reward < 0.75"),
    ("0.75 to 1", "reward >= 0.75 AND reward < 1"),
    ("1", "reward = 1"),
    ("> 1", "reward > 1"),
)
"""What a reward is shown as and filtered by, in the order of the places of `facets_listed`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FacetValue:
    """A value, how many rollouts have it, and the filter that selects them."""

    value: str
    filter: str
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Facet:
    """Values of a field, the most frequent ones first.

    Attributes:
        examined: How many rollouts were counted, the newest ones.
        has_more: Whether the list has more than these.
        has_more_values: Whether they have more values than are returned.
    """

    field: Field
    values: Sequence[FacetValue]
    examined: int
    has_more: bool
    has_more_values: bool


class FacetCounter:
    """Adds up the values of one field."""

    def __init__(self, field: Field) -> None:
        self._field = field
        self._counts: Counter[tuple[str, object]] = Counter()
        self.examined = 0

    def add(self, value: object, count: int, *, key: str = "") -> None:
        """Counts rollouts with a value, of a map with the value of a key; None is an unset one."""
        self._counts[key, value] += count

    @property
    def numbers(self) -> Iterable[int]:
        """The counted values that are numbers."""
        return [value for _, value in self._counts if isinstance(value, int)]

    def facet(self, *, names: Mapping[int, str], has_more: bool) -> Facet:
        """Returns what was counted.

        Args:
            names: Names by number, of a field that is stored as the number of a name.
            has_more: Whether there are more rollouts than were counted.
        """
        counted = sorted(self._counts.items(), key=lambda entry: (-entry[1], str(entry[0])))
        if self._field is Field.REWARD:
            counted.sort(key=lambda entry: entry[0][1] if isinstance(entry[0][1], int) else -1)
        values = []
        for (key, value), count in counted[:MAX_VALUES]:
            shown, where = self._shown(key, value, names)
            values.append(FacetValue(value=shown, filter=where, count=count))
        return Facet(
            field=self._field,
            values=values,
            examined=self.examined,
            has_more=has_more,
            has_more_values=len(counted) > MAX_VALUES,
        )

    def _shown(self, key: str, value: object, names: Mapping[int, str]) -> tuple[str, str]:
        """Returns how a value is shown, and its filter."""
        field = self._field
        if key:
            return f"{key}={value}", f"{field}.{quoted(key)} = {quoted(str(value))}"
        if field is Field.REWARD:
            return REWARD_FILTERS[value] if isinstance(value, int) else ("", f"NOT {field}:*")
        if field in ROLLOUTS.words:
            word = next(word for word, number in ROLLOUTS.words[field].items() if number == value)
            return word, f"{field} = {word}"
        name = names.get(value, "") if isinstance(value, int) else ""
        return name, f"{field} = {quoted(name)}"


def quoted(text: str) -> str:
    """Writes a text as a value of a filter."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
