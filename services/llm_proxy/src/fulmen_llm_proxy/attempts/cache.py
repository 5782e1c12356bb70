"""Attribution of calls that name their attempt in the URL, from the attempt's data in the store."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from fulmen.errors import AttemptNotFound, PermissionDenied
from fulmen.ids import AttemptName
from fulmen_llm_proxy.attempts.caller import Attribution
from fulmen_llm_proxy.attempts.guard import AttemptState, AttemptStatus, attempt_over
from fulmen_llm_proxy.attempts.watch import AttemptChecks
from fulmen_service_kit.security.call_terms import CallTerms
from fulmen_service_kit.security.tokens import Caller

MAX_CACHED: Final = 10_000


class AttemptCache:
    """Caches the project and mode of running attempts; the guard learns when they end."""

    def __init__(self, checks: AttemptChecks, *, max_cached: int = MAX_CACHED) -> None:
        self._checks = checks
        self._max_cached = max_cached
        self._known: OrderedDict[AttemptName, AttemptStatus] = OrderedDict()

    async def attribution(self, attempt: AttemptName, caller: Caller) -> Attribution:
        """Returns the attribution of a call that names an attempt.

        The first call of an attempt waits for the store; later ones do not.

        Raises:
            PermissionDenied: if the caller's key belongs to another attempt.
            AttemptNotFound: if the attempt does not exist, or belongs to another project.
            AttemptOver: if the attempt has ended.
            FulmenError: if the store does not answer.
        """
        if caller.attempt not in (None, attempt):
            raise PermissionDenied("The key belongs to an attempt other than the one in the URL.", role=caller.role)
        status = self._known.get(attempt)
        if status is None:
            status = await self._fetch(attempt, caller)
        elif not caller.may_access(status.project):
            raise _not_found(attempt)
        return Attribution(
            attempt=str(attempt),
            project=status.project,
            epoch=attempt.number,
            mode=status.mode,
            expires_s=caller.expires_s,
            terms=CallTerms(
                token_budget=caller.terms.token_budget,
                training_run=status.training_run,
                agent=status.agent,
                continues=caller.terms.continues,
            ),
        )

    async def _fetch(self, attempt: AttemptName, caller: Caller) -> AttemptStatus:
        (status,) = await self._checks.ask([(str(attempt), attempt.number)])
        if status.state is AttemptState.NOT_FOUND or not caller.may_access(status.project):
            raise _not_found(attempt)
        if status.state is not AttemptState.LIVE:
            raise attempt_over(str(attempt), status.state)
        self._known[attempt] = status
        if len(self._known) > self._max_cached:
            self._known.popitem(last=False)
        return status


def _not_found(attempt: AttemptName) -> AttemptNotFound:
    return AttemptNotFound("Attempt not found.", attempt=attempt)
