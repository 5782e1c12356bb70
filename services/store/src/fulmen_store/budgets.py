"""Budgets in dollars: what they are of, and for how long."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, Protocol

from fulmen.errors import BudgetExceeded, Violation

__all__ = ["PERIODS", "SUBJECT", "Budget", "UsedUpBudgets", "budget_problems"]

MAX_BUDGETS: Final = 256
MAX_MICROS: Final = 10**15
SUBJECT: Final = re.compile(r"project|(?=.{1,128}$)(key|agent|run)/[A-Za-z0-9._-]+")
PERIODS: Final = range(3)
"""Numbers of `fulmen.store.v1.BudgetPeriod`."""

Budget = tuple[str, int, int]
"""Subject, period, millionths of a dollar."""


def budget_problems(budgets: Sequence[Budget]) -> Iterator[Violation]:
    """Yields the violations of a project's budgets."""
    where = "project.model_limits.budgets"
    if len(budgets) > MAX_BUDGETS:
        yield Violation(field=where, description=f"has more than {MAX_BUDGETS} entries")
    seen: set[tuple[str, int]] = set()
    for index, (subject, period, micros) in enumerate(budgets[:MAX_BUDGETS]):
        field = f"{where}[{index}]"
        if not SUBJECT.fullmatch(subject):
            text = f"{subject[:128]!r} is not project, key/TOKEN_ID, agent/ID or run/ID"
            yield Violation(field=f"{field}.subject", description=text)
        if period not in PERIODS:
            yield Violation(field=f"{field}.period", description="is not a known period")
        if not 1 <= micros <= MAX_MICROS:
            yield Violation(field=f"{field}.limit_micros", description=f"is {micros}, allowed are 1 to {MAX_MICROS}")
        if (subject, period) in seen:
            yield Violation(field=field, description="is the second budget for this subject and period")
        seen.add((subject, period))


class _Rollout(Protocol):
    """What is asked of a new rollout."""

    project: str
    training_run: str

    @property
    def default_task_type(self) -> str:
        """The resource id of its agent; empty without one."""


class UsedUpBudgets:
    """The budgets of training runs and agents that were used up when this replica last looked."""

    def __init__(self) -> None:
        self._by_project: dict[str, dict[str, str]] = {}

    def replace(self, found: dict[str, dict[str, str]]) -> None:
        """Sets why which subjects of which projects may have no more rollouts."""
        self._by_project = found

    def require(self, rollouts: Iterable[_Rollout]) -> None:
        """Checks that rollouts may be created.

        Raises:
            BudgetExceeded: If the budget of their training run or agent is used up.
        """
        if not self._by_project:
            return
        for rollout in rollouts:
            for subject, why in self._by_project.get(rollout.project, {}).items():
                if subject in (f"run/{rollout.training_run.rpartition('/')[2]}", f"agent/{rollout.default_task_type}"):
                    raise BudgetExceeded(why, project=rollout.project, subject=subject)
