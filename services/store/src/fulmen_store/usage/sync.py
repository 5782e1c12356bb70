"""Receives the usage and rate-limit windows that proxy processes report."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from fulmen.errors import ProjectNotFound, Violation
from fulmen_store.budgets import PERIODS, SUBJECT
from fulmen_store.malformed import malformed_request
from fulmen_store.rollouts.table import RolloutTable
from fulmen_store.usage.table import UsageTable
from fulmen_store.usage.usage import SpendEntry, StoredSpend, StoredUsage, UsageReport

__all__ = [
    "UsageSync",
]

MAX_ENTRIES: Final = 5_000
MAX_WINDOWS: Final = 10_000
MAX_MODEL: Final = 128
MAX_BACKEND: Final = 128
MAX_COUNT: Final = 10**15
MAX_SEQUENCE: Final = 2**62
_INSTANCE: Final = re.compile(r"[A-Za-z0-9-]{1,64}")


class UsageSync:
    """Stores the reports of proxy processes."""

    def __init__(self, *, table: UsageTable, rollouts: RolloutTable) -> None:
        """Creates the use case; `rollouts` provides the numbers of projects."""
        self._table = table
        self._rollouts = rollouts

    async def sync(self, report: UsageReport, *, may_access: Callable[[str], bool]) -> int:
        """Counts usage once and stores the windows; returns the number of dropped entries.

        Raises:
            ArgumentInvalid: If the report is invalid; lists every problem, and nothing was counted.
            DatabaseUnavailable: If the outcome is unknown; the same report may be sent again.
        """
        problems = list(_problems(report))
        if problems:
            raise malformed_request(problems)
        rows: list[StoredUsage] = []
        for entry in report.entries:
            project_id = await self._find(entry.project) if may_access(entry.project) else None
            if project_id is not None:
                key = (project_id, entry.rollout_id, entry.attempt, entry.model, entry.backend)
                rows.append((*key, *entry.counts))
        spend: list[StoredSpend] = []
        for each in report.spend:
            project_id = await self._find(each.project) if may_access(each.project) else None
            if project_id is not None:
                spend.append((project_id, each.subject, each.period, each.cost_micros))
        if rows or spend:
            await self._table.add(report.instance_id, report.sequence, rows, spend)
        if report.window_count:
            # The previous windows expire by themselves.
            await self._table.replace_windows(report)
        return len(report.entries) - len(rows)

    async def _find(self, project: str) -> int | None:
        try:
            return await self._rollouts.project_id(project)
        except ProjectNotFound:
            return None


def _problems(report: UsageReport) -> Iterator[Violation]:
    if not _INSTANCE.fullmatch(report.instance_id):
        yield _violation("instance_id", "is not 1 to 64 of [A-Za-z0-9-]")
    if (report.entries or report.spend) and not 1 <= report.sequence <= MAX_SEQUENCE:
        yield _violation("sequence", "is required with usage, from 1")
    if len(report.entries) > MAX_ENTRIES:
        yield _violation("usage", f"has more than {MAX_ENTRIES} entries")
    yield from _spend_problems(report.spend)
    if report.window_count > MAX_WINDOWS:
        yield _violation("windows", f"has more than {MAX_WINDOWS} entries")
    if not 0 <= report.slot <= MAX_COUNT:
        yield _violation("slot", "is out of range")
    for index, entry in enumerate(report.entries[:MAX_ENTRIES]):
        if not 1 <= len(entry.model) <= MAX_MODEL or "\0" in entry.model:
            yield _violation(f"usage[{index}].model", f"does not have 1 to {MAX_MODEL} characters")
        if len(entry.backend) > MAX_BACKEND or "\0" in entry.backend:
            yield _violation(f"usage[{index}].backend", f"has more than {MAX_BACKEND} characters")
        if not all(0 <= count <= MAX_COUNT for count in entry.counts):
            yield _violation(f"usage[{index}].usage", "has a number outside 0 to 10^15")


def _spend_problems(spend: Sequence[SpendEntry]) -> Iterator[Violation]:
    if len(spend) > MAX_ENTRIES:
        yield _violation("spend", f"has more than {MAX_ENTRIES} entries")
    for index, each in enumerate(spend[:MAX_ENTRIES]):
        if not SUBJECT.fullmatch(each.subject) or each.period not in PERIODS or not 0 <= each.cost_micros <= MAX_COUNT:
            yield _violation(f"spend[{index}]", "is not the cost of a budget")


def _violation(path: str, description: str) -> Violation:
    return Violation(field=path, description=description)
