"""Polls the store for the status of attempts: one batch for all that have called recently, a few times per second.

Invariant: no call waits for the answer. While the store is unavailable, the last known status applies.
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
from fulmen_llm_proxy.attempts.guard import AttemptGuard, AttemptState, AttemptStatus
from fulmen_llm_proxy.metrics.keys import KeyMetrics
from fulmen_service_kit.security.tokens import Caller as TokenCaller

INTERVAL_S: Final = 0.25
TIMEOUT_S: Final = 3.0
MAX_BATCH: Final = 1000

# An unknown status (of a later release) counts as live, as the contract requires.
_STATES: Final = {
    pb.ATTEMPT_STATUS_ENDED: AttemptState.ENDED,
    pb.ATTEMPT_STATUS_STALE_EPOCH: AttemptState.STALE_EPOCH,
    pb.ATTEMPT_STATUS_CANCEL_REQUESTED: AttemptState.CANCEL_REQUESTED,
    pb.ATTEMPT_STATUS_NOT_FOUND: AttemptState.NOT_FOUND,
}
_MODES: Final = {
    rollout_pb2.ROLLOUT_MODE_TRAIN: "train",
    rollout_pb2.ROLLOUT_MODE_VALIDATION: "validation",
    rollout_pb2.ROLLOUT_MODE_TEST: "test",
}

_log = structlog.get_logger(__name__)


class AttemptChecks:
    """Asks the store for the status of attempts."""

    def __init__(self, channel: FulmenChannel) -> None:
        """Sets the channel, whose token must have the role `service`."""
        self._stub = lease_service_pb2_grpc.LeaseServiceStub(channel)

    async def ask(self, attempts: Sequence[tuple[str, int]]) -> list[AttemptStatus]:
        """Returns the status of attempts, each given with its epoch or 0, in order.

        Raises:
            FulmenError: if the store does not answer.
        """
        checks = [pb.AttemptCheck(attempt=attempt, epoch=epoch) for attempt, epoch in attempts]
        answer = await self._stub.CheckAttempts(pb.CheckAttemptsRequest(attempts=checks), timeout=TIMEOUT_S)
        return [
            AttemptStatus(
                state=_STATES.get(result.status, AttemptState.LIVE),
                project=result.project,
                mode=_MODES.get(result.mode, ""),
                training_run=result.training_run,
                agent=result.agent,
            )
            for result in answer.results
        ]

    async def runs(self, key: TokenCaller) -> bool:
        """Returns whether the attempt of a key has not ended.

        Raises:
            FulmenError: if the store does not answer.
        """
        (status,) = await self.ask([(key.subject, key.epoch)])
        # The guard refuses a cancelled attempt, and reports it.
        is_running = status.state in (AttemptState.LIVE, AttemptState.CANCEL_REQUESTED)
        return is_running and status.project == key.project


class AttemptWatch:
    """Background role: keeps the guard informed about the attempts that call."""

    def __init__(
        self, *, guard: AttemptGuard, checks: AttemptChecks, metrics: KeyMetrics, interval_s: float = INTERVAL_S
    ) -> None:
        """Sets the guard and the store's checks.

        Args:
            interval_s: pause between two polls, seconds.
        """
        self._guard = guard
        self._checks = checks
        self._metrics = metrics
        self._interval_s = interval_s
        self._store_unavailable = False

    async def run(self) -> None:
        """Polls until cancelled."""
        while True:
            await self._guard.busy()
            await self.poll_once()
            await asyncio.sleep(self._interval_s)

    async def poll_once(self) -> None:
        """Polls once for every attempt that has called recently."""
        asked = iter(self._guard.pending_checks())
        while batch := list(islice(asked, MAX_BATCH)):
            await self._check(batch)

    async def _check(self, batch: Sequence[Attribution]) -> None:
        try:
            statuses = await self._checks.ask([(one.attempt, one.epoch) for one in batch])
        except FulmenError as error:
            self._guard.recheck(batch)
            if not self._store_unavailable:
                _log.warning("attempt_check_failed", reason=error.reason)
            self._store_unavailable = True
            return
        self._store_unavailable = False
        for attribution, status in zip(batch, statuses, strict=False):
            ended = self._guard.update(attribution, status)
            if ended:
                self._metrics.calls_of_ended_attempts.inc(ended)
                _log.info("calls_of_ended_attempt_cancelled", attempt=attribution.attempt, calls=ended)
