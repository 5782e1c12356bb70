"""fulmen.llm_proxy.v1.CaptureService."""

from __future__ import annotations

import asyncio

import grpc.aio

from fulmen.errors import ArgumentInvalid, Violation
from fulmen.ids import parse_attempt_name
from fulmen.llm_proxy.v1 import capture_service_pb2, capture_service_pb2_grpc
from fulmen_llm_proxy.capture.capture_queue import CaptureQueue
from fulmen_llm_proxy.capture.ledger import AttemptLedger, Summary
from fulmen_llm_proxy.routing.balancing import key_of
from fulmen_llm_proxy.routing.seats import Seats
from fulmen_llm_proxy.workers.siblings import Siblings, combined_instance
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
        queue: CaptureQueue,
        seats: Seats,
        instance_id: str,
        siblings: Siblings | None = None,
    ) -> None:
        """Sets the accounts of this process.

        Args:
            seats: where attempts are seated; a flush is the last that is asked of an attempt.
            siblings: the other workers behind the same port; None with a single process.
        """
        self._ledger = ledger
        self._queue = queue
        self._seats = seats
        self._instance_id = instance_id
        self._siblings = siblings

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
        if self._siblings is None or request.this_process_only:
            return await self._own(attempts, wait_s)
        own, others = await asyncio.gather(
            self._own(attempts, wait_s), self._siblings.flush(attempts, timeout_s=wait_s)
        )
        return _combined([own, *others])

    async def _own(self, attempts: list[str], wait_s: float) -> capture_service_pb2.FlushCapturesResponse:
        for attempt in attempts:
            self._seats.leave(key_of(attempt.encode()))
        try:
            async with asyncio.timeout(wait_s):
                for attempt in attempts:
                    if not self._ledger.is_settled(attempt):
                        self._queue.flush_soon()
                        await self._ledger.settled(attempt)
        except TimeoutError:
            pass  # the summaries name those not flushed
        return capture_service_pb2.FlushCapturesResponse(
            summaries=[_as_message(self._ledger.summary(attempt)) for attempt in attempts],
            instance_id=self._instance_id,
        )


def _combined(
    answers: list[capture_service_pb2.FlushCapturesResponse],
) -> capture_service_pb2.FlushCapturesResponse:
    """Adds up the workers' summaries of each attempt."""
    summaries = [
        capture_service_pb2.CaptureSummary(
            attempt=parts[0].attempt,
            flushed=all(part.flushed for part in parts),
            call_count=sum(part.call_count for part in parts),
            infra_failure_count=sum(part.infra_failure_count for part in parts),
            unusable_count=sum(part.unusable_count for part in parts),
            prompt_token_count=sum(part.prompt_token_count for part in parts),
            completion_token_count=sum(part.completion_token_count for part in parts),
            throttled_count=sum(part.throttled_count for part in parts),
        )
        for parts in zip(*(answer.summaries for answer in answers), strict=True)
    ]
    own, *others = (answer.instance_id for answer in answers)
    return capture_service_pb2.FlushCapturesResponse(summaries=summaries, instance_id=combined_instance(own, others))


def _as_message(summary: Summary) -> capture_service_pb2.CaptureSummary:
    return capture_service_pb2.CaptureSummary(
        attempt=summary.attempt,
        flushed=summary.flushed,
        call_count=summary.calls,
        infra_failure_count=summary.infra_failures,
        unusable_count=summary.unusable,
        prompt_token_count=summary.prompt_tokens,
        completion_token_count=summary.completion_tokens,
        throttled_count=summary.throttled,
    )
