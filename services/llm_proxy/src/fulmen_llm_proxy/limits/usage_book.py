"""Usage of calls that has not been reported to the store.

Invariants: usage is reported exactly once, however often the store is unavailable. Memory is bounded by the number of
distinct projects, attempts, models and backends, not by time; beyond that, usage is counted without its attempt, so
no tokens and no cost are lost. One event loop owns the book.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Final

MAX_KEYS: Final = 100_000
BATCH_KEYS: Final = 5_000
"""The store's limit per request."""

UsageKey = tuple[str, str, str, str]
"""Names of project, attempt, model and backend; attempt and backend may be empty."""


SpendKey = tuple[str, str, int]
"""Project, subject and period of a budget, as in `fulmen.store.v1.SpendBudget`."""


@dataclass(slots=True)
class UsageCounts:
    """Calls, tokens and cost; the cost in micro-dollars, including fractions."""

    requests: int = 0
    failures: int = 0
    prompt: int = 0
    cached: int = 0
    completion: int = 0
    cost_micros: float = 0.0

    def add(self, other: UsageCounts) -> None:
        """Adds other counts."""
        self.requests += other.requests
        self.failures += other.failures
        self.prompt += other.prompt
        self.cached += other.cached
        self.completion += other.completion
        self.cost_micros += other.cost_micros


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageBatch:
    """An immutable batch, sent under the same sequence number until the store acknowledges it."""

    sequence: int
    counts: Mapping[UsageKey, UsageCounts]
    spend: Mapping[SpendKey, int]


class UsageBook:
    """Counts usage by project, attempt, model and backend."""

    def __init__(self, *, max_keys: int = MAX_KEYS) -> None:
        """Creates an empty book.

        Args:
            max_keys: number of distinct keys beyond which usage is counted without its attempt.
        """
        self._max_keys = max_keys
        self._counts: dict[UsageKey, UsageCounts] = {}
        self._batch: UsageBatch | None = None
        self._rests: dict[tuple[str, str, str], float] = {}
        self._spend: dict[SpendKey, float] = {}
        self._sequence = 0
        self.total = UsageCounts()
        """Total usage since the process started."""
        self.without_attempt = 0
        """Number of calls counted without their attempt."""

    def __len__(self) -> int:
        return len(self._counts)

    def count(self, key: UsageKey, counts: UsageCounts, budgets: Iterable[SpendKey] = ()) -> None:
        """Adds a call's usage, and its cost to budgets; takes ownership of `counts`."""
        self.total.add(counts)
        for each in budgets:
            self._spend[each] = self._spend.get(each, 0.0) + counts.cost_micros
        self._count(key, counts)

    def _count(self, key: UsageKey, counts: UsageCounts) -> None:
        known = self._counts.get(key)
        if known is not None:
            known.add(counts)
            return
        if len(self._counts) >= self._max_keys and key[1]:
            self.without_attempt += counts.requests
            self._count((key[0], "", key[2], key[3]), counts)
            return
        self._counts[key] = counts

    def batch(self) -> UsageBatch | None:
        """Returns the batch to report: the same one until `acknowledge`; None if there is nothing to report."""
        if self._batch is None and self._counts:
            self._sequence += 1
            keys = list(islice(self._counts, BATCH_KEYS))
            counts = {key: self._take(key) for key in keys}
            self._batch = UsageBatch(sequence=self._sequence, counts=counts, spend=self._take_spend())
        return self._batch

    def acknowledge(self) -> None:
        """Drops the batch, which the store now has."""
        self._batch = None

    def _take(self, key: UsageKey) -> UsageCounts:
        """Removes counts with their cost in whole micro-dollars; carries the fraction over to the next ones."""
        counts = self._counts.pop(key)
        if counts.cost_micros:
            place = (key[0], key[2], key[3])
            cost = counts.cost_micros + self._rests.get(place, 0.0)
            counts.cost_micros = math.floor(cost)
            self._rests[place] = cost - counts.cost_micros
        return counts

    def unreported_micros(self, budget: SpendKey) -> float:
        """Returns the cost of a budget that the store has not acknowledged."""
        sent = 0 if self._batch is None else self._batch.spend.get(budget, 0)
        return sent + self._spend.get(budget, 0.0)

    def _take_spend(self) -> dict[SpendKey, int]:
        """Removes the whole micro-dollars of the budgets of a batch; the fractions stay for the next one."""
        taken = {key: math.floor(self._spend[key]) for key in islice(self._spend, BATCH_KEYS)}
        for key, micros in taken.items():
            rest = self._spend.pop(key) - micros
            if rest:
                self._spend[key] = rest  # behind the others
        return {key: micros for key, micros in taken.items() if micros}

    @property
    def is_empty(self) -> bool:
        """Whether all usage has been reported."""
        return not self._counts and self._batch is None
