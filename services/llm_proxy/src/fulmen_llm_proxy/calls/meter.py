"""Enforces limits before a call, and counts its usage and cost afterwards."""

from __future__ import annotations

from collections.abc import Mapping

from fulmen.errors import ModelLimitExceeded, TokenBudgetExceeded
from fulmen_llm_proxy.apis.api import CallRequest
from fulmen_llm_proxy.apis.usage import TokenCounts, tokens_to_reserve
from fulmen_llm_proxy.attempts.caller import Caller
from fulmen_llm_proxy.limits.limiter import CallLimiter, CallLimits, Reservation
from fulmen_llm_proxy.limits.prices import PriceTable
from fulmen_llm_proxy.limits.usage_book import UsageBook, UsageCounts
from fulmen_llm_proxy.metrics.usage import UsageMetrics
from fulmen_llm_proxy.routing.table import Backend, Target

_MAX_MODEL = 128
_UNNAMED_MODEL = "unknown"


class Meter:
    """Enforces the limits of calls and counts their usage; one per process."""

    def __init__(
        self,
        *,
        limiter: CallLimiter,
        usage: UsageBook,
        prices: PriceTable,
        project: str,
        assumed_completion_tokens: int,
        metrics: UsageMetrics,
    ) -> None:
        """Sets the limits and the accounts.

        Args:
            project: owner of the backends.
            assumed_completion_tokens: completion tokens reserved for a call that sets no maximum.
        """
        self._limiter = limiter
        self._usage = usage
        self._prices = prices
        self._project = project
        self._assumed = assumed_completion_tokens
        self._metrics = metrics

    def admit(self, caller: Caller, request: CallRequest) -> Reservation | None:
        """Admits a call; returns None if no limit applies to it.

        Raises:
            ModelLimitExceeded: if a limit of its project or attempt is exhausted.
            TokenBudgetExceeded: if its attempt has used up its token budget.
        """
        attribution = caller.attribution
        budget = 0 if attribution is None else attribution.token_budget
        if self._limiter.is_unlimited(caller.project, budget):
            return None
        try:
            return self._limiter.admit(
                caller.project,
                attempt="" if attribution is None else attribution.attempt,
                budget=budget,
                tokens=tokens_to_reserve(request, assumed_completion=self._assumed),
            )
        except ModelLimitExceeded as error:
            kind = "attempt" if attribution is not None and error.metadata["of"] == attribution.attempt else "project"
            self._metrics.refused(error.metadata["limit"], kind)
            raise
        except TokenBudgetExceeded:
            self._metrics.refused("attempt_token_budget", "attempt")
            raise

    def enter(self, backend: Backend, request: CallRequest) -> Reservation:
        """Admits a call to a backend that has limits.

        Raises:
            ModelLimitExceeded: if a limit of the backend is exhausted.
        """
        limits = CallLimits(
            requests_per_minute=backend.requests_per_minute, tokens_per_minute=backend.tokens_per_minute
        )
        tokens = tokens_to_reserve(request, assumed_completion=self._assumed)
        try:
            return self._limiter.enter(self._project, backend=f"backends/{backend.id}", limits=limits, tokens=tokens)
        except ModelLimitExceeded as error:
            self._metrics.refused(error.metadata["limit"], "backend")
            raise

    def settle(
        self,
        reservation: Reservation | None,
        at_backends: Mapping[str, Reservation] | None,
        *,
        target: Target | None,
        tokens: int,
    ) -> None:
        """Replaces a call's reservations by its tokens, which count at the target's backend, not at those tried before."""
        if reservation is not None:
            self._limiter.settle(reservation, tokens)
        for backend_id, each in (at_backends or {}).items():
            self._limiter.settle(each, tokens if target is not None and target.backend_id == backend_id else 0)

    def count(
        self, caller: Caller, request: CallRequest, counts: TokenCounts, *, target: Target | None, failed: bool
    ) -> None:
        """Counts a call with its tokens and its cost."""
        cost, backend = 0.0, ""
        if target is not None:
            cost = self._prices.cost_micros(target.backend_id, target.model, counts)
            backend = f"backends/{target.backend_id}"
        attribution = caller.attribution
        self._usage.count(
            (
                caller.project,
                "" if attribution is None else attribution.attempt,
                # A call that matched no route may name any model.
                request.model[:_MAX_MODEL] if target is not None else _UNNAMED_MODEL,
                backend,
            ),
            UsageCounts(1, int(failed), counts.prompt or 0, counts.cached, counts.completion or 0, cost),
        )
