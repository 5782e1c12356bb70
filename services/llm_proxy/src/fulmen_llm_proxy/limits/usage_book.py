"""What calls used since the store was last told.

Invariants: what was counted is told exactly once, however often the store is away; memory is bounded by the number of
different projects, attempts, models and backends, and not by time: beyond the bound attempts are counted without their
name, so that no token and no dollar is lost. One event loop owns the book.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Final

MAX_KEYS: Final = 100_000
BATCH_KEYS: Final = 5_000
"""The store's limit of one exchange."""

UsageKey = tuple[str, str, str, str]
"""Names of project, attempt, model and backend; attempt and backend may be empty."""


@dataclass(slots=True)
class UsageCounts:
    """Calls and tokens; the cost in millionths of a dollar, with what lies behind the point."""

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
    """What is told at once; it never changes, and is told under the same sequence until the store has it."""

    sequence: int
    counts: Mapping[UsageKey, UsageCounts]


class UsageBook:
    """Counts usage by key."""

    def __init__(self, *, max_keys: int = MAX_KEYS) -> None:
        """Takes how many different keys are counted before attempts lose their name."""
        self._max_keys = max_keys
        self._counts: dict[UsageKey, UsageCounts] = {}
        self._batch: UsageBatch | None = None
        self._rests: dict[tuple[str, str, str], float] = {}
        self._sequence = 0
        self.total = UsageCounts()
        """Everything that was ever counted."""
        self.nameless = 0
        """Calls of attempts that were counted without its name."""

    def __len__(self) -> int:
        return len(self._counts)

    def count(self, key: UsageKey, counts: UsageCounts) -> None:
        """Counts what a call used; keeps the counts."""
        self.total.add(counts)
        self._count(key, counts)

    def _count(self, key: UsageKey, counts: UsageCounts) -> None:
        known = self._counts.get(key)
        if known is not None:
            known.add(counts)
            return
        if len(self._counts) >= self._max_keys and key[1]:
            self.nameless += counts.requests
            self._count((key[0], "", key[2], key[3]), counts)
            return
        self._counts[key] = counts

    def batch(self) -> UsageBatch | None:
        """Returns what is to be told now: the last batch again until it was `told`; None if there is nothing."""
        if self._batch is None and self._counts:
            self._sequence += 1
            keys = list(islice(self._counts, BATCH_KEYS))
            self._batch = UsageBatch(sequence=self._sequence, counts={key: self._take(key) for key in keys})
        return self._batch

    def told(self) -> None:
        """Forgets the batch: the store has it."""
        self._batch = None

    def _take(self, key: UsageKey) -> UsageCounts:
        """Takes counts out, their cost in whole millionths; what lies behind the point goes with the next ones."""
        counts = self._counts.pop(key)
        if counts.cost_micros:
            place = (key[0], key[2], key[3])
            cost = counts.cost_micros + self._rests.get(place, 0.0)
            counts.cost_micros = math.floor(cost)
            self._rests[place] = cost - counts.cost_micros
        return counts

    @property
    def is_empty(self) -> bool:
        """Whether the store has been told everything."""
        return not self._counts and self._batch is None
