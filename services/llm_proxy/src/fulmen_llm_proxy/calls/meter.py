"""Enforces limits before a call, and counts its usage and cost afterwards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from fulmen.errors import BudgetExceeded, ModelLimitExceeded, PriceUnknown, TokenBudgetExceeded
from fulmen_llm_proxy.apis.api import CallRequest
from fulmen_llm_proxy.apis.usage import TokenCounts, counts_to_reserve, tokens_to_reserve
from fulmen_llm_proxy.attempts.caller import Caller
from fulmen_llm_proxy.limits.accounts import Accounts
from fulmen_llm_proxy.limits.budgets import Budget, require_price
from fulmen_llm_proxy.limits.limiter import CallLimits, Reservation
from fulmen_llm_proxy.limits.prices import Price
from fulmen_llm_proxy.limits.usage_book import UsageCounts
from fulmen_llm_proxy.metrics.usage import UsageMetrics
from fulmen_llm_proxy.routing.table import Backend, Target

_MAX_MODEL = 128
_UNNAMED_MODEL = "unknown"


class Meter:
    """Enforces the limits of calls and counts their usage; one per process."""

    def __init__(
        self,
        *,
        accounts: Accounts,
        project: str,
        assumed_completion_tokens: int,
        metrics: UsageMetrics,
    ) -> None:
        """Sets the limits and the accounts.

        Args:
            project: owner of the backends.
            assumed_completion_tokens: completion tokens reserved for a call that sets no maximum.
        """
        self._limiter = accounts.limiter
        self._usage = accounts.usage
        self._budgets = accounts.budgets
        self._prices = accounts.prices
        self._project = project
        self._assumed = assumed_completion_tokens
        self._metrics = metrics

    def budgets(self, caller: Caller, request: CallRequest) -> list[Budget]:
        """Returns the budgets that pay for a call.

        Raises:
            BudgetExceeded: if one is used up.
            ModelLimitExceeded: if the calls that run may use one up.
        """
        found = self._budgets.of(caller.project, caller.subjects()) if request.api.is_metered else []
        try:
            self._budgets.require(found)
        except (BudgetExceeded, ModelLimitExceeded) as error:
            kind = (error.metadata.get("subject") or error.metadata["of"]).partition("/")[0]
            self._metrics.refused("budget", kind)
            raise
        return found

    def estimated_micros(self, budget: Budget, request: CallRequest, target: Target) -> float:
        """Returns what a call may cost at a target, micro-dollars.

        Raises:
            PriceUnknown: if the target's model has no price.
        """
        price = self._prices.of(target.backend_id, target.model)
        try:
            known = require_price(price, model=target.model, backend_id=target.backend_id, budget=budget)
        except PriceUnknown:
            self._metrics.refused("price", "backend")
            raise
        return known.cost_micros(counts_to_reserve(request, assumed_completion=self._assumed))

    @contextmanager
    def pass_on(self, caller: Caller, backend: Backend, *, what: str) -> Iterator[None]:
        """Counts a request that is passed on unread, until the end of its block; it uses no tokens.

        Raises:
            ModelLimitExceeded, TokenBudgetExceeded: if a limit of its project, its attempt or the backend is exhausted.
            PriceUnknown: if a budget pays for the caller's calls.
        """
        if budgets := self._budgets.of(caller.project, caller.subjects()):
            require_price(None, model=what, backend_id=backend.id, budget=budgets[0])
        failed, held = True, self.admit(caller, None)
        at_backend: Reservation | None = None
        try:
            if backend.requests_per_minute:
                at_backend = self.enter(backend, None)
            yield
            failed = False
        finally:
            for each in (held, at_backend):
                if each is not None:
                    self._limiter.settle(each, 0)
            key = (caller.project, caller.attempt, what[:_MAX_MODEL], f"backends/{backend.id}")
            self._usage.count(key, UsageCounts(requests=1, failures=int(failed)))

    def admit(self, caller: Caller, request: CallRequest | None) -> Reservation | None:
        """Admits a call, or a request that is not read; returns None if no limit applies to it.

        Raises:
            ModelLimitExceeded: if a limit of its project or attempt is exhausted.
            TokenBudgetExceeded: if its attempt has used up its token budget.
        """
        attribution = caller.attribution
        budget = 0 if attribution is None else attribution.terms.token_budget
        if self._limiter.is_unlimited(caller.project, budget):
            return None
        try:
            return self._limiter.admit(
                caller.project,
                attempt="" if attribution is None else attribution.attempt,
                budget=budget,
                tokens=self._tokens(request),
            )
        except ModelLimitExceeded as error:
            kind = "attempt" if attribution is not None and error.metadata["of"] == attribution.attempt else "project"
            self._metrics.refused(error.metadata["limit"], kind)
            raise
        except TokenBudgetExceeded:
            self._metrics.refused("attempt_token_budget", "attempt")
            raise

    def _tokens(self, request: CallRequest | None) -> int:
        return 0 if request is None else tokens_to_reserve(request, assumed_completion=self._assumed)

    def enter(self, backend: Backend, request: CallRequest | None) -> Reservation:
        """Admits a call to a backend that has limits.

        Raises:
            ModelLimitExceeded: if a limit of the backend is exhausted.
        """
        limits = CallLimits(
            requests_per_minute=backend.requests_per_minute, tokens_per_minute=backend.tokens_per_minute
        )
        name, tokens = f"backends/{backend.id}", self._tokens(request)
        try:
            return self._limiter.enter(self._project, backend=name, limits=limits, tokens=tokens)
        except ModelLimitExceeded as error:
            self._metrics.refused(error.metadata["limit"], "backend")
            raise

    def price_of(self, target: Target) -> Price | None:
        """Returns the price of a target's model; None without one."""
        return None if self._prices.is_empty else self._prices.of(target.backend_id, target.model)

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
        self,
        caller: Caller,
        request: CallRequest,
        counts: TokenCounts,
        *,
        target: Target | None,
        budgets: Iterable[Budget],
        failed: bool,
    ) -> None:
        """Counts a call with its tokens and its cost, which its budgets pay."""
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
            [each.key for each in budgets],
        )
