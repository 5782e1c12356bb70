"""Budgets that are used up: a project's pauses its queue, a training run's or an agent's ends the creation of its rollouts."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Final

import structlog

from fulmen.errors import DatabaseUnavailable
from fulmen.store.v1.model_limits_pb2 import BUDGET_PERIOD_DAY, BUDGET_PERIOD_MONTH, ModelLimits, SpendBudget
from fulmen_store.budgets import UsedUpBudgets
from fulmen_store.database.stored import read_column
from fulmen_store.replicas.wakeups import PROJECTS_CHANGED, Wakeups
from fulmen_store.usage.table import UsageTable

__all__ = ["BudgetWatch"]

INTERVAL_S: Final = 1.0
REASON: Final = "The budget of $"
"""How the reason begins for which this module pauses queues, which it resumes as well."""
_PERIODS: Final = {BUDGET_PERIOD_DAY: ("/day", "a day"), BUDGET_PERIOD_MONTH: ("/month", "a month")}

_log = structlog.get_logger()


class BudgetWatch:
    """Background role: looks which budgets are used up, once a second."""

    def __init__(self, *, table: UsageTable, used_up: UsedUpBudgets, wakeups: Wakeups) -> None:
        """Creates the role; `wakeups` notifies all replicas that a project has changed."""
        self._table = table
        self._used_up = used_up
        self._wakeups = wakeups

    async def run(self) -> None:
        """Looks until cancelled."""
        while True:
            with suppress(DatabaseUnavailable):
                await self.look()
            await asyncio.sleep(INTERVAL_S)

    async def look(self) -> None:
        """Looks once, and pauses and resumes queues.

        Raises:
            DatabaseUnavailable: If the database is unavailable.
        """
        limits = {
            name: read_column(ModelLimits, stored) for name, stored in await self._table.model_limits(project=None)
        }
        budgets = {name: list(each.budgets) for name, each in limits.items() if each is not None and each.budgets}
        spends = await self._table.spends(project=None) if budgets else {}
        paused: dict[str, str] = {}
        refused: dict[str, dict[str, str]] = {}
        for project, given in budgets.items():
            for budget in given:
                spent = spends.get((project, budget.subject, int(budget.period)), 0)
                if spent < budget.limit_micros:
                    continue
                why = _why(project, budget, spent)
                if budget.subject == "project":
                    paused[project] = why
                else:
                    refused.setdefault(project, {})[budget.subject] = why
        self._used_up.replace(refused)
        changed = await self._table.pause_used_up(paused, mark=REASON)
        for project, is_paused in changed:
            _log.warning("queue_paused_by_budget" if is_paused else "queue_resumed_by_budget", project=project)
        if changed:
            self._wakeups.announce([PROJECTS_CHANGED])


def _why(project: str, budget: SpendBudget, spent: int) -> str:
    period, words = _PERIODS.get(budget.period, ("", ""))
    of = project if budget.subject == "project" else f"{budget.subject} in {project}"
    return (
        f"{REASON}{budget.limit_micros / 1e6:,.2f}{f' {words}' if words else ''} of {of} is used up: ${spent / 1e6:,.2f} are spent. "
        f"To continue: `fulmen project update {project.removeprefix('projects/')} --budget {budget.subject}=DOLLARS{period}`."
    )
