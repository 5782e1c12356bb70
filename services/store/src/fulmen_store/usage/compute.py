"""What attempts cost by the time that they run, beside what their model calls cost.

Each end of an attempt that this replica commits is priced by the labels of its runner and added to the usage and the budgets.
Invariant: an end is counted once at most. Those of the last second before this process is killed are not counted.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import structlog

from fulmen.errors import DatabaseUnavailable
from fulmen.store.v1 import lease_pb2
from fulmen.store.v1.model_limits_pb2 import ModelLimits
from fulmen_store.database.stored import read_column
from fulmen_store.leases.leases import EndedAttempt
from fulmen_store.usage.table import EndedRow, UsageTable
from fulmen_store.usage.usage import StoredSpend, StoredUsage

__all__ = ["COMPUTE", "ComputeCosts", "ComputePrices", "price_problem"]

COMPUTE: Final = "compute"
"""The model under which the usage has the cost of compute."""
INTERVAL_S: Final = 1.0
MAX_ENDS: Final = 100_000
"""Ends that wait for the database; beyond them the oldest are not counted."""
ENDS_PER_BATCH: Final = 1000
ANY: Final = "*"
_HOUR_S: Final = 3600.0
_LABEL: Final = re.compile(r"[^=]{1,128}=.{0,128}")

_log = structlog.get_logger()


def price_problem(prices: Mapping[str, float]) -> str:
    """Returns what is wrong with prices by label; empty if nothing is."""
    wrong = [
        label
        for label, price in prices.items()
        if not (label == ANY or _LABEL.fullmatch(label)) or not 0 <= price <= 1e6
    ]
    return f"{', '.join(sorted(wrong))}: give `label=value` or `*`, and 0 to 1000000 dollars" if wrong else ""


@dataclass(frozen=True, slots=True)
class ComputePrices:
    """Dollars per hour of an attempt by label of its runner, `key=value`; `*` is for runners without one of the others."""

    by_label: Mapping[str, float]

    def micros(self, labels: Mapping[str, str], duration_s: float) -> float:
        """Returns the cost of an attempt, millionths of a dollar. Of several labels with a price the dearest counts."""
        own = [self.by_label[label] for key, value in labels.items() if (label := f"{key}={value}") in self.by_label]
        return max(own, default=self.by_label.get(ANY, 0.0)) * duration_s / _HOUR_S * 1e6


class ComputeCosts:
    """Background role: counts what ended attempts cost."""

    def __init__(self, *, prices: ComputePrices, table: UsageTable, instance_id: str) -> None:
        """Sets the prices.

        Args:
            instance_id: Id of this process, never reused.
        """
        self._prices = prices
        self._table = table
        self._instance_id = instance_id
        self._sequence = 0
        self._ends: list[EndedAttempt] = []
        self._batch: list[EndedAttempt] = []
        """What may be stored under the next sequence number already."""

    def ended(self, ends: Sequence[EndedAttempt]) -> None:
        """Notes ended attempts."""
        if not self._prices.by_label:
            return
        self._ends.extend(ends)
        if len(self._ends) > MAX_ENDS:
            _log.error("compute_not_counted", attempts=len(self._ends) - MAX_ENDS)
            del self._ends[:-MAX_ENDS]

    async def run(self) -> None:
        """Counts until cancelled."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            try:
                await self.count()
            except DatabaseUnavailable:
                continue

    async def count(self) -> None:
        """Counts what has ended.

        Raises:
            DatabaseUnavailable: If the database is unavailable; the ends stay.
        """
        while True:
            if not self._batch:
                self._batch, self._ends = self._ends[:ENDS_PER_BATCH], self._ends[ENDS_PER_BATCH:]
            if not (batch := self._batch):
                return
            found = await self._table.ended_rows([(end.item.rollout_id, end.session_id) for end in batch])
            budgets = {name: _budgets(stored) for name, stored in await self._table.model_limits(project=None)}
            rows: list[StoredUsage] = []
            spend: list[StoredSpend] = []
            for end, row in zip(batch, found, strict=True):
                info = read_column(lease_pb2.RunnerInfo, row.info) or lease_pb2.RunnerInfo()
                micros = round(self._prices.micros(info.labels, end.duration_s))
                if not micros:
                    continue
                project_id = end.item.project_id
                rows.append((project_id, end.item.rollout_id, end.epoch, COMPUTE, "", 0, 0, 0, 0, 0, micros))
                wanted = _subjects(row)
                spend += [
                    (project_id, subject, period, micros)
                    for subject, period in budgets.get(row.project, ())
                    if subject in wanted
                ]
            if rows:
                await self._table.add(self._instance_id, self._sequence + 1, rows, spend)
                self._sequence += 1
            self._batch = []


def _subjects(row: EndedRow) -> set[str]:
    """Returns the subjects of budgets that an attempt counts for; a key's are model calls only."""
    subjects = {"project"}
    if row.training_run:
        subjects.add(f"run/{row.training_run.rpartition('/')[2]}")
    if row.agent.startswith("resources/"):
        subjects.add(f"agent/{row.agent.split('/')[1]}")
    return subjects


def _budgets(stored: bytes) -> list[tuple[str, int]]:
    limits = read_column(ModelLimits, stored) or ModelLimits()
    return [(each.subject, int(each.period)) for each in limits.budgets]
