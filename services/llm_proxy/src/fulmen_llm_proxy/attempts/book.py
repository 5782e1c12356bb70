"""Attempts that callers name in the URL: whose they are, as the store says."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from fulmen.errors import AttemptNotFound, PermissionDenied
from fulmen.ids import AttemptName
from fulmen_llm_proxy.attempts.caller import Attribution
from fulmen_llm_proxy.attempts.guard import Standing, Verdict, attempt_over
from fulmen_llm_proxy.attempts.watch import AttemptChecks
from fulmen_service_kit.tokens import Caller

MAX_REMEMBERED: Final = 10_000


class AttemptBook:
    """Remembers the projects and modes of attempts that were found running; the guard hears of their end."""

    def __init__(self, checks: AttemptChecks, *, max_remembered: int = MAX_REMEMBERED) -> None:
        """Takes what asks the store."""
        self._checks = checks
        self._max_remembered = max_remembered
        self._known: OrderedDict[AttemptName, Standing] = OrderedDict()

    async def attribution(self, attempt: AttemptName, caller: Caller) -> Attribution:
        """Returns the attribution of a call that names an attempt.

        The first call of an attempt waits for the store, later ones do not.

        Raises:
            PermissionDenied: if the caller's key is that of another attempt.
            AttemptNotFound: if there is no such attempt, or the caller's project is not its rollout's.
            AttemptOver: if it is over.
            FulmenError: if the store does not answer.
        """
        if caller.attempt not in (None, attempt):
            raise PermissionDenied("The key is that of another attempt than the URL names.", role=caller.role)
        standing = self._known.get(attempt)
        if standing is None:
            standing = await self._look(attempt, caller)
        elif not caller.may_access(standing.project):
            raise _not_found(attempt)
        return Attribution(
            attempt=str(attempt),
            project=standing.project,
            epoch=attempt.number,
            mode=standing.mode,
            expires_s=caller.expires_s,
            token_budget=caller.token_budget,
        )

    async def _look(self, attempt: AttemptName, caller: Caller) -> Standing:
        (standing,) = await self._checks.ask([(str(attempt), attempt.number)])
        if standing.verdict is Verdict.NOT_FOUND or not caller.may_access(standing.project):
            raise _not_found(attempt)
        if standing.verdict is not Verdict.LIVE:
            raise attempt_over(str(attempt), standing.verdict)
        self._known[attempt] = standing
        if len(self._known) > self._max_remembered:
            self._known.popitem(last=False)
        return standing


def _not_found(attempt: AttemptName) -> AttemptNotFound:
    return AttemptNotFound("There is no such attempt.", attempt=attempt)
