"""Budgets in dollars as options and on the screen."""

from __future__ import annotations

import re
from typing import Final

from fulmen.store.v1 import model_limits_pb2 as pb
from fulmen_cli.exits import CommandFailed, Exit

__all__ = ["BUDGET_FORM", "budget_text", "set_budget"]

BUDGET_FORM: Final = "SUBJECT=DOLLARS[/day|/month], SUBJECT one of project, key/TOKEN_ID, agent/ID and run/ID"
_FORM: Final = re.compile(r"(?P<subject>[^=\s]+)=(?P<dollars>\d{1,9}(\.\d{1,6})?)(/(?P<period>day|month))?")
_PERIODS: Final = {
    None: pb.BUDGET_PERIOD_UNSPECIFIED,
    "day": pb.BUDGET_PERIOD_DAY,
    "month": pb.BUDGET_PERIOD_MONTH,
}
_WORDS: Final = {number: word for word, number in _PERIODS.items()}
MICROS: Final = 10**6


def set_budget(limits: pb.ModelLimits, text: str) -> None:
    """Sets the budget of a subject and period; 0 dollars remove it.

    Raises:
        CommandFailed: if the text has another form.
    """
    found = _FORM.fullmatch(text)
    if found is None:
        raise CommandFailed(f"--budget {text}: give {BUDGET_FORM}.", exit_code=Exit.USAGE)
    whole, _, part = found["dollars"].partition(".")
    micros = int(whole) * MICROS + int(part.ljust(6, "0"))
    subject, period = found["subject"], _PERIODS[found["period"]]
    others = [each for each in limits.budgets if (each.subject, each.period) != (subject, period)]
    del limits.budgets[:]
    limits.budgets.extend(others)
    if micros:
        limits.budgets.add(subject=subject, limit_micros=micros, period=period)


def budget_text(budget: pb.SpendBudget) -> str:
    """Writes a budget as it is given, and what is spent."""
    period = _WORDS.get(budget.period)
    limit = f"{budget.limit_micros / MICROS:.6f}".rstrip("0").rstrip(".")
    return f"{budget.subject}={limit}{f'/{period}' if period else ''} (${budget.spent_micros / MICROS:,.2f} spent)"
