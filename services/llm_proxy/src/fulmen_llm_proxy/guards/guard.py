"""Guards: checks of the operator's own, before a call is sent and before its answer is given.

A guard allows or refuses; it changes nothing. Each has a deadline, and a setting says what follows when it fails or is late.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import structlog

from fulmen_llm_proxy.metrics.guards import GuardMetrics

MAX_MESSAGE = 500
"""Longest text of a refusal that reaches the caller, characters."""

_log = structlog.get_logger(__name__)


class Phase(StrEnum):
    """When a guard is asked."""

    BEFORE = "before"
    AFTER = "after"


class Checker(Protocol):
    """Code that judges calls."""

    async def check(self, document: bytes) -> str | None:
        """Returns why a call is refused; None to allow it. The caller sets the deadline.

        Args:
            document: JSON object with `phase`, `project`, `attempt`, `model`, `api`, `request`, and after the call its
                `answer`, a stream's as the whole answer would be.

        Raises:
            Exception: if it cannot judge.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """A checker and the terms on which it is asked.

    Attributes:
        deadline_s: time for a verdict, seconds.
        refuses_on_failure: whether a call is refused that it could not judge in time.
    """

    name: str
    checker: Checker
    phases: frozenset[Phase]
    deadline_s: float
    refuses_on_failure: bool


class GuardRefused(Exception):
    """A guard refuses a call, or could not judge one that must be judged.

    Attributes:
        guard: its name.
        is_verdict: whether it has judged.
    """

    def __init__(self, message: str, *, guard: str, is_verdict: bool) -> None:
        super().__init__(message)
        self.guard = guard
        self.is_verdict = is_verdict


class Guards:
    """All guards, asked one after the other; the first refusal counts."""

    def __init__(self, guards: Sequence[Guard], metrics: GuardMetrics) -> None:
        self._guards = {phase: [each for each in guards if phase in each.phases] for phase in Phase}
        self._metrics = metrics

    def any(self, phase: Phase) -> bool:
        """Returns whether a guard is asked in a phase."""
        return bool(self._guards[phase])

    async def require(self, phase: Phase, document: bytes) -> None:
        """Asks the guards of a phase.

        Raises:
            GuardRefused: if one refuses, or fails and refuses on failure.
        """
        for guard in self._guards[phase]:
            await self._ask(guard, phase, document)

    async def _ask(self, guard: Guard, phase: Phase, document: bytes) -> None:
        try:
            async with asyncio.timeout(guard.deadline_s):
                refusal = await guard.checker.check(document)
        except Exception as error:
            self._metrics.asked(guard.name, phase, "failed")
            _log.warning("guard_failed", guard=guard.name, phase=phase.value, error=type(error).__name__)
            if guard.refuses_on_failure:
                text = f"The guard '{guard.name}' could not check the call; try again."
                raise GuardRefused(text, guard=guard.name, is_verdict=False) from error
            return
        self._metrics.asked(guard.name, phase, "allowed" if refusal is None else "refused")
        if refusal is not None:
            text = f"Refused by the guard '{guard.name}': {refusal[:MAX_MESSAGE]}"
            raise GuardRefused(text, guard=guard.name, is_verdict=True)
