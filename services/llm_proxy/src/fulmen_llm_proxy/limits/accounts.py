"""What calls may use and cost, what they have used and cost, and by which clock."""

from __future__ import annotations

import time
from dataclasses import dataclass

from fulmen_llm_proxy.limits.budgets import Budgets
from fulmen_llm_proxy.limits.limiter import CallLimiter
from fulmen_llm_proxy.limits.prices import PriceTable
from fulmen_llm_proxy.limits.usage_book import UsageBook
from fulmen_llm_proxy.limits.usage_sync import StoreClock


@dataclass(frozen=True, slots=True, kw_only=True)
class Accounts:
    """The accounts of one process."""

    clock: StoreClock
    limiter: CallLimiter
    usage: UsageBook
    budgets: Budgets
    prices: PriceTable


def open_accounts(prices: PriceTable) -> Accounts:
    """Returns empty accounts."""
    clock, usage = StoreClock(wall=time.time, monotonic=time.monotonic), UsageBook()
    return Accounts(
        clock=clock, limiter=CallLimiter(clock=clock.now), usage=usage, budgets=Budgets(usage), prices=prices
    )
