"""Tells the store what calls used and how far limits are used up, and hears the same of the other processes.

Invariant: usage is told exactly once. A batch that may or may not have arrived is told again as it was, under the same
sequence; meanwhile everything else is counted into the next one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Final

import structlog

from fulmen.errors import ArgumentInvalid, FulmenError, Unimplemented
from fulmen.rpc.channel import FulmenChannel
from fulmen.store.v1 import model_limits_pb2, usage_service_pb2, usage_service_pb2_grpc
from fulmen_llm_proxy.limits.limiter import CallLimiter, CallLimits, LimitKey, ProjectLimits, Window
from fulmen_llm_proxy.limits.sliding_count import SLOT_S
from fulmen_llm_proxy.limits.usage_book import UsageBatch, UsageBook

INTERVAL_S: Final = 1.0
DEADLINE_S: Final = 5.0
MAX_WINDOWS: Final = 10_000
"""The store's limit of one exchange; of more, the ones that were used last are told."""

_log = structlog.get_logger(__name__)


class UsageSync:
    """Exchanges once a second: a background role.

    While the store is away usage is kept and each process holds the limits by itself, by what it heard last.
    """

    def __init__(
        self,
        *,
        channel: FulmenChannel,
        instance_id: str,
        usage: UsageBook,
        limiter: CallLimiter,
        clock: StoreClock,
        interval_s: float = INTERVAL_S,
    ) -> None:
        """Wires the role; `instance_id` is this process's, which no other one has or will have."""
        self._stub = usage_service_pb2_grpc.UsageServiceStub(channel)
        self._instance_id = instance_id
        self._usage = usage
        self._limiter = limiter
        self._clock = clock
        self._interval_s = interval_s
        self._turn = asyncio.Lock()
        self._is_away = False

    async def run(self) -> None:
        """Exchanges until it is cancelled."""
        while True:
            try:
                await self.exchange()
            except FulmenError as error:
                if not self._is_away:
                    _log.warning("usage_waits_for_store", reason=error.reason)
                self._is_away = True
            else:
                self._is_away = False
            await asyncio.sleep(self._interval_s)

    async def told(self) -> None:
        """Returns when the store has all usage, or does not take any; the caller gives the deadline."""
        while not self._usage.is_empty:
            try:
                await self.exchange()
            except Unimplemented:
                # A store of the release before.
                return
            except FulmenError:
                await asyncio.sleep(self._interval_s)

    async def exchange(self) -> None:
        """Exchanges once.

        Raises:
            FulmenError: if the store did not answer; the next exchange tells the same again.
        """
        async with self._turn:
            batch = self._usage.batch()
            slot, windows = self._limiter.windows()
            request = _request(self._instance_id, batch, slot, windows[:MAX_WINDOWS])
            sent = time.monotonic()
            try:
                answer = await self._stub.SyncUsage(request, timeout=DEADLINE_S)
            except ArgumentInvalid as error:
                # Telling it again would end the same way, and hold up everything behind it.
                _log.error("usage_refused", entries=len(request.usage), reason=str(error))
                self._usage.told()
                return
            self._usage.told()
            if answer.rejected_count:
                _log.warning("usage_of_unknown_projects", entries=answer.rejected_count)
            self._hear(answer, batch, windows, sent)

    def _hear(
        self,
        answer: usage_service_pb2.SyncUsageResponse,
        batch: UsageBatch | None,
        windows: Iterable[Window],
        sent: float,
    ) -> None:
        store_s = answer.store_time.ToNanoseconds() / 1e9
        if self._clock.hear(store_s, sent=sent, received=time.monotonic()):
            self._limiter.forget_minute()
        limits = {each.project: project_limits(each.limits) for each in answer.limits}
        self._limiter.set_projects({project: each for project, each in limits.items() if each})
        self._limiter.hear(int(store_s // SLOT_S), [_window(each) for each in answer.others])
        keys = {window.key[2]: window.key for window in windows if window.key[2]}
        stored = {keys[each.attempt]: each.token_count for each in answer.attempts if each.attempt in keys}
        self._limiter.counted(_told(batch), stored)


def project_limits(message: model_limits_pb2.ModelLimits) -> ProjectLimits:
    """Reads the limits of a project."""
    return ProjectLimits(
        project=_limits(message.project),
        attempt=_limits(message.attempt),
        attempt_token_budget=message.attempt_token_budget,
    )


def _limits(message: model_limits_pb2.CallLimits) -> CallLimits:
    return CallLimits(
        requests_per_minute=message.requests_per_minute,
        tokens_per_minute=message.tokens_per_minute,
        concurrent_calls=message.concurrent_calls,
    )


def _told(batch: UsageBatch | None) -> dict[LimitKey, int]:
    told: dict[LimitKey, int] = {}
    for (project, attempt, _, _), counts in ({} if batch is None else batch.counts).items():
        if attempt:
            key = (project, "", attempt)
            told[key] = told.get(key, 0) + counts.prompt + counts.completion
    return told


def _request(
    instance_id: str, batch: UsageBatch | None, slot: int, windows: Iterable[Window]
) -> usage_service_pb2.SyncUsageRequest:
    return usage_service_pb2.SyncUsageRequest(
        instance_id=instance_id,
        sequence=0 if batch is None else batch.sequence,
        usage=[
            usage_service_pb2.UsageDelta(
                project=project,
                attempt=attempt,
                model=model,
                backend=backend,
                usage=usage_service_pb2.Usage(
                    request_count=counts.requests,
                    failure_count=counts.failures,
                    prompt_token_count=counts.prompt,
                    cached_token_count=counts.cached,
                    completion_token_count=counts.completion,
                    cost_micros=int(counts.cost_micros),
                ),
            )
            for (project, attempt, model, backend), counts in ({} if batch is None else batch.counts).items()
        ],
        windows=[
            usage_service_pb2.LimitWindow(
                project=window.key[0],
                backend=window.key[1],
                attempt=window.key[2],
                request_counts=window.requests,
                token_counts=window.tokens,
                in_flight_count=window.in_flight,
                reserved_token_count=window.reserved,
            )
            for window in windows
        ],
        slot=slot,
    )


def _window(message: usage_service_pb2.LimitWindow) -> Window:
    return Window(
        key=(message.project, message.backend, message.attempt),
        requests=message.request_counts,
        tokens=message.token_counts,
        in_flight=message.in_flight_count,
        reserved=message.reserved_token_count,
    )


TOLERANCE_S: Final = 0.25
"""Differences below are taken for the way between store and proxy."""


class StoreClock:
    """Goes on by the monotonic clock from what the store said last; until then from the machine's own time."""

    def __init__(self, *, wall: Callable[[], float], monotonic: Callable[[], float]) -> None:
        """Takes seconds since 1970, and monotonic seconds."""
        self._monotonic = monotonic
        self._ahead_s = wall() - monotonic()

    def now(self) -> float:
        """Returns seconds since 1970."""
        return self._monotonic() + self._ahead_s

    def hear(self, store_s: float, *, sent: float, received: float) -> bool:
        """Takes what the store said between two moments of the monotonic clock; tells whether this one was set back."""
        ahead_s = store_s - (sent + received) / 2
        step_s = ahead_s - self._ahead_s
        if abs(step_s) <= TOLERANCE_S + (received - sent) / 2:
            return False
        self._ahead_s = ahead_s
        return step_s < 0
