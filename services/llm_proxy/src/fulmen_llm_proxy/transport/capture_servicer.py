"""fulmen.llm_proxy.v1.CaptureService."""

from __future__ import annotations

import asyncio

import grpc.aio

from fulmen.errors import ArgumentInvalid, Violation
from fulmen.ids import parse_attempt_name
from fulmen.llm_proxy.v1 import capture_service_pb2, capture_service_pb2_grpc
from fulmen_llm_proxy.domain.ledger import AttemptLedger, Summary

MAX_ATTEMPTS = 1000
MAX_WAIT_S = 300.0
"""The longest wait for a caller that gives no deadline."""
_MARGIN = 0.1
_MAX_MARGIN_S = 1.0
"""How long before the caller's deadline an answer is given: a tenth of it, at most a second."""


class CaptureServicer(capture_service_pb2_grpc.CaptureServiceServicer):
    """Tells what was recorded of attempts, once the store has it."""

    def __init__(self, *, ledger: AttemptLedger, instance_id: str) -> None:
        self._ledger = ledger
        self._instance_id = instance_id

    async def FlushCaptures(
        self, request: capture_service_pb2.FlushCapturesRequest, context: grpc.aio.ServicerContext
    ) -> capture_service_pb2.FlushCapturesResponse:
        """Answers when the store has every span of the attempts, or shortly before the deadline."""
        if len(request.attempts) > MAX_ATTEMPTS:
            problem = Violation(field="attempts", description=f"has more than {MAX_ATTEMPTS} names")
            raise ArgumentInvalid("The request is malformed.", violations=[problem])
        attempts = [str(parse_attempt_name(name, field="attempts")) for name in request.attempts]
        left_s = context.time_remaining()
        wait_s = MAX_WAIT_S if left_s is None else min(left_s, MAX_WAIT_S)
        wait_s -= min(_MAX_MARGIN_S, wait_s * _MARGIN)
        try:
            async with asyncio.timeout(wait_s):
                for attempt in attempts:
                    await self._ledger.settled(attempt)
        except TimeoutError:
            pass  # the summaries say which are not flushed
        return capture_service_pb2.FlushCapturesResponse(
            summaries=[_as_message(self._ledger.summary(attempt)) for attempt in attempts],
            instance_id=self._instance_id,
        )


def _as_message(summary: Summary) -> capture_service_pb2.CaptureSummary:
    return capture_service_pb2.CaptureSummary(
        attempt=summary.attempt,
        flushed=summary.flushed,
        call_count=summary.calls,
        infra_failure_count=summary.infra_failures,
        unusable_count=summary.unusable,
        prompt_token_count=summary.prompt_tokens,
        completion_token_count=summary.completion_tokens,
    )
