"""fulmen.llm_proxy.v1.CaptureService."""

from __future__ import annotations

import asyncio

import grpc.aio

from fulmen.errors import ArgumentInvalid, Violation
from fulmen.ids import parse_attempt_name
from fulmen.llm_proxy.v1 import capture_service_pb2, capture_service_pb2_grpc
from fulmen.store.v1 import proxy_service_pb2
from fulmen_llm_proxy.capture.ledger import AttemptLedger, Summary
from fulmen_llm_proxy.capture.settlement import CaptureSettlement
from fulmen_llm_proxy.routing.balancing import key_of
from fulmen_llm_proxy.routing.seats import Seats
from fulmen_service_kit.security.auth import require_project

MAX_ATTEMPTS = 1000
MAX_WAIT_S = 300.0
"""Maximum wait for a caller without a deadline, seconds."""
_MARGIN = 0.1
_MAX_MARGIN_S = 1.0
"""Margin before the caller's deadline: a tenth of it, at most one second."""


class CaptureServicer(capture_service_pb2_grpc.CaptureServiceServicer):
    """Reports the recorded calls of attempts once the store has them."""

    def __init__(
        self,
        *,
        ledger: AttemptLedger,
        settlement: CaptureSettlement,
        seats: Seats,
        instance_id: str,
    ) -> None:
        """Sets the accounts of this process.

        Args:
            settlement: waits until the store has the captures of all processes.
            seats: where attempts are seated; a flush is the last that is asked of an attempt.
        """
        self._ledger = ledger
        self._settlement = settlement
        self._seats = seats
        self._instance_id = instance_id

    async def FlushCaptures(
        self, request: capture_service_pb2.FlushCapturesRequest, context: grpc.aio.ServicerContext
    ) -> capture_service_pb2.FlushCapturesResponse:
        """Answers once the store has every span of the attempts, or shortly before the deadline."""
        if len(request.attempts) > MAX_ATTEMPTS:
            problem = Violation(field="attempts", description=f"has more than {MAX_ATTEMPTS} names")
            raise ArgumentInvalid("The request is malformed.", violations=[problem])
        names = [parse_attempt_name(name, field="attempts") for name in request.attempts]
        for name in names:
            require_project(name.project)
        attempts = [str(name) for name in names]
        left_s = context.time_remaining()
        wait_s = MAX_WAIT_S if left_s is None else min(left_s, MAX_WAIT_S)
        wait_s -= min(_MAX_MARGIN_S, wait_s * _MARGIN)
        totals: dict[str, proxy_service_pb2.CaptureTotals] = {}
        for attempt in attempts:
            self._seats.leave(key_of(attempt.encode()))
        try:
            async with asyncio.timeout(wait_s):
                await self._settlement.settled(attempts, totals)
        except TimeoutError:
            pass  # the summaries name those not flushed
        return capture_service_pb2.FlushCapturesResponse(
            summaries=[_as_message(self._ledger.summary(attempt), totals.get(attempt)) for attempt in attempts],
            instance_id=self._instance_id,
        )


def _as_message(own: Summary, others: proxy_service_pb2.CaptureTotals | None) -> capture_service_pb2.CaptureSummary:
    """Adds up the summaries of this process and of the others; None if the store did not return them."""
    is_known = others is not None
    others = others or proxy_service_pb2.CaptureTotals()
    rest = others.sum
    return capture_service_pb2.CaptureSummary(
        attempt=own.attempt,
        # Of an attempt that has lost captures, nothing more is waited for.
        flushed=is_known and (others.lost or (own.flushed and not rest.open)),
        lost=others.lost,
        call_count=own.calls + rest.call_count,
        infra_failure_count=own.infra_failures + rest.infra_failure_count,
        unusable_count=own.unusable + rest.unusable_count,
        prompt_token_count=own.prompt_tokens + rest.prompt_token_count,
        completion_token_count=own.completion_tokens + rest.completion_token_count,
        throttled_count=own.throttled + rest.throttled_count,
    )
