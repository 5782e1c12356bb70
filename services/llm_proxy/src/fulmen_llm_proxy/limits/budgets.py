"""Budgets in dollars: limits on the cost of the calls of a project, a key, an agent or a training run.

A call is admitted while less than the budget is spent. Its estimated cost is reserved while it runs; its actual cost
replaces the reservation when it ends.

Invariant: with one process, a budget is exceeded at most by what calls cost beyond their reservations, and by the last
call. With several, each knows what the others have spent as of the last synchronisation, about a second ago, and does not know
their reservations. One event loop owns the budgets.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from fulmen.errors import BudgetExceeded, ModelLimitExceeded, PriceUnknown
from fulmen.store.v1 import model_limits_pb2
from fulmen_llm_proxy.limits.limiter import BUSY_RETRY_S
from fulmen_llm_proxy.limits.prices import Price
from fulmen_llm_proxy.limits.usage_book import SpendKey, UsageBook

_PERIODS: Final[Mapping[int, tuple[str, str]]] = {
    model_limits_pb2.BUDGET_PERIOD_DAY: ("per day", "/day"),
    model_limits_pb2.BUDGET_PERIOD_MONTH: ("per month", "/month"),
}


@dataclass(slots=True, eq=False)
class Budget:
    """A budget and its state.

    Attributes:
        limit: maximum cost, micro-dollars.
        stored: what all processes have spent in the current period as last reported by the store, micro-dollars.
        reserved: estimated cost of the running calls of this process, micro-dollars.
    """

    key: SpendKey
    limit: int
    stored: int
    reserved: float = 0.0


class Budgets:
    """The budgets of all projects."""

    def __init__(self, book: UsageBook) -> None:
        """Sets the book, which has the cost that is not reported yet."""
        self._book = book
        self._of: dict[str, dict[str, list[Budget]]] = {}

    def set_all(self, budgets: Mapping[str, Sequence[model_limits_pb2.SpendBudget]]) -> None:
        """Replaces the budgets of all projects; what running calls have reserved stays."""
        known = {each.key: each for subjects in self._of.values() for found in subjects.values() for each in found}
        self._of = {}
        for project, given in budgets.items():
            for message in given:
                key = (project, message.subject, int(message.period))
                budget = known.get(key) or Budget(key=key, limit=0, stored=0)
                budget.limit, budget.stored = message.limit_micros, message.spent_micros
                self._of.setdefault(project, {}).setdefault(message.subject, []).append(budget)

    def of(self, project: str, subjects: Iterable[str]) -> list[Budget]:
        """Returns the budgets of a project that are of one of these subjects, which are not read if it has none."""
        found = self._of.get(project)
        return [] if found is None else [each for name in subjects for each in found.get(name, ())]

    def require(self, budgets: Iterable[Budget]) -> None:
        """Checks that a call may start.

        Raises:
            BudgetExceeded: if a budget is used up.
            ModelLimitExceeded: if running calls may use it up; retryable, since they may cost less than was reserved.
        """
        for budget in budgets:
            spent = budget.stored + self._book.unreported_micros(budget.key)
            if spent >= budget.limit:
                raise _exceeded(budget, spent)
            if spent + budget.reserved >= budget.limit:
                raise ModelLimitExceeded(
                    f"The running calls may use up the {_words(budget)}; retry in {BUSY_RETRY_S:.0f} s.",
                    retry_after_s=BUSY_RETRY_S,
                    limit="budget",
                    of=budget.key[1],
                    size=budget.limit,
                )


def require_price(price: Price | None, *, model: str, backend_id: str, budget: Budget) -> Price:
    """Returns the price of a model.

    Raises:
        PriceUnknown: if it has none.
    """
    if price is None:
        raise PriceUnknown(
            f"Model '{model}' of backend '{backend_id}' has no price, and the {_words(budget)} applies to the call: add a price "
            "to FULMEN_LLM_PROXY_PRICES or FULMEN_LLM_PROXY_PRICE_FILE (`fulmen proxy import-prices`), or remove the budget.",
            model=model,
            backend=f"backends/{backend_id}",
        )
    return price


def _words(budget: Budget) -> str:
    project, subject, period = budget.key
    whose = project if subject == "project" else f"{subject} in {project}"
    return " ".join(
        filter(None, [f"budget of ${budget.limit / 1e6:,.2f}", _PERIODS.get(period, ("", ""))[0], f"of {whose}"])
    )


def _exceeded(budget: Budget, spent: float) -> BudgetExceeded:
    project, subject, period = budget.key
    raised = f"{subject}=DOLLARS{_PERIODS.get(period, ('', ''))[1]}"
    return BudgetExceeded(
        f"The {_words(budget)} is used up: ${spent / 1e6:,.2f} are spent. Raise it with "
        f"`fulmen project update {project.removeprefix('projects/')} --budget {raised}`.",
        project=project,
        subject=subject,
        period=period,
        limit_micros=budget.limit,
        spent_micros=round(spent),
    )
