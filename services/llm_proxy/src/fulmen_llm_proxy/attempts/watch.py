"""Asks the store how attempts stand: all that call lately in one question, a few times a second.

Invariant: no call waits for the answer. While the store is away, what was last known stays.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import islice
from typing import Final

import structlog

from fulmen.errors import FulmenError
from fulmen.rpc.channel import FulmenChannel
from fulmen.store.v1 import lease_service_pb2 as pb
from fulmen.store.v1 import lease_service_pb2_grpc, rollout_pb2
from fulmen_llm_proxy.attempts.caller import Attribution
from fulmen_llm_proxy.attempts.guard import AttemptGuard, Standing, Verdict
from fulmen_llm_proxy.metrics.service import Metrics

INTERVAL_S: Final = 0.25
LIMIT_S: Final = 3.0
MAX_ASKED: Final = 1000

# A status of a later release counts as live, as the contract says.
_VERDICTS: Final = {
    pb.ATTEMPT_STATUS_ENDED: Verdict.ENDED,
    pb.ATTEMPT_STATUS_STALE_EPOCH: Verdict.STALE_EPOCH,
    pb.ATTEMPT_STATUS_CANCEL_REQUESTED: Verdict.CANCEL_REQUESTED,
    pb.ATTEMPT_STATUS_NOT_FOUND: Verdict.NOT_FOUND,
}
_MODES: Final = {
    rollout_pb2.ROLLOUT_MODE_TRAIN: "train",
    rollout_pb2.ROLLOUT_MODE_VALIDATION: "validation",
    rollout_pb2.ROLLOUT_MODE_TEST: "test",
}

_log = structlog.get_logger(__name__)


class AttemptChecks:
    """Asks the store about attempts."""

    def __init__(self, channel: FulmenChannel) -> None:
        """Takes a channel whose token has the role service."""
        self._stub = lease_service_pb2_grpc.LeaseServiceStub(channel)

    async def ask(self, attempts: Sequence[tuple[str, int]]) -> list[Standing]:
        """Returns how attempts, each with its epoch or 0, stand; in order.

        Raises:
            FulmenError: if the store does not answer.
        """
        checks = [pb.AttemptCheck(attempt=attempt, epoch=epoch) for attempt, epoch in attempts]
        answer = await self._stub.CheckAttempts(pb.CheckAttemptsRequest(attempts=checks), timeout=LIMIT_S)
        return [
            Standing(
                verdict=_VERDICTS.get(standing.status, Verdict.LIVE),
                project=standing.project,
                mode=_MODES.get(standing.mode, ""),
            )
            for standing in answer.results
        ]


class AttemptWatch:
    """Background role: tells the guard how the attempts that call stand."""

    def __init__(
        self, *, guard: AttemptGuard, checks: AttemptChecks, metrics: Metrics, interval_s: float = INTERVAL_S
    ) -> None:
        """Wires the role; `interval_s` is the pause between two questions."""
        self._guard = guard
        self._checks = checks
        self._metrics = metrics
        self._interval_s = interval_s
        self._away = False

    async def run(self) -> None:
        """Watches until it is cancelled."""
        while True:
            await self._guard.busy()
            await self.ask_once()
            await asyncio.sleep(self._interval_s)

    async def ask_once(self) -> None:
        """Asks once about every attempt that called lately."""
        asked = iter(self._guard.questions())
        while batch := list(islice(asked, MAX_ASKED)):
            await self._ask(batch)

    async def _ask(self, batch: Sequence[Attribution]) -> None:
        try:
            standings = await self._checks.ask([(one.attempt, one.epoch) for one in batch])
        except FulmenError as error:
            self._guard.unanswered(batch)
            if not self._away:
                _log.warning("attempts_not_checked", reason=error.reason)
            self._away = True
            return
        self._away = False
        for attribution, standing in zip(batch, standings, strict=False):
            ended = self._guard.answered(attribution, standing)
            if ended:
                self._metrics.calls_of_ended_attempts.inc(ended)
                _log.info("calls_of_attempt_ended", attempt=attribution.attempt, calls=ended)
