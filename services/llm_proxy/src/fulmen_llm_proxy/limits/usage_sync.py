"""Reports usage and the state of limits to the store, and receives the other processes'.

Invariant: usage is reported exactly once. A batch that may have arrived is sent again unchanged under the same
sequence number; meanwhile all other usage is counted into the next batch.
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
from fulmen_llm_proxy.limits.budgets import Budgets
from fulmen_llm_proxy.limits.limiter import CallLimiter, CallLimits, LimitKey, ProjectLimits, Window
from fulmen_llm_proxy.limits.sliding_count import SLOT_S
from fulmen_llm_proxy.limits.usage_book import UsageBatch, UsageBook

INTERVAL_S: Final = 1.0
DEADLINE_S: Final = 5.0
MAX_WINDOWS: Final = 10_000
"""The store's limit per request; the most recently used windows are sent first."""

_log = structlog.get_logger(__name__)


class UsageSync:
    """Background role: synchronises with the store once per second.

    While the store is unavailable, usage is kept, and each process enforces the limits with the last known counts of
    the others.
    """

    def __init__(
        self,
        *,
        channel: FulmenChannel,
        instance_id: str,
        usage: UsageBook,
        limiter: CallLimiter,
        budgets: Budgets,
        clock: StoreClock,
        interval_s: float = INTERVAL_S,
    ) -> None:
        """Initializes the role.

        Args:
            instance_id: unique id of this process, never reused.
            interval_s: pause between two requests, seconds.
        """
        self._stub = usage_service_pb2_grpc.UsageServiceStub(channel)
        self._instance_id = instance_id
        self._usage = usage
        self._limiter = limiter
        self._budgets = budgets
        self._clock = clock
        self._interval_s = interval_s
        self._lock = asyncio.Lock()
        self._store_unavailable = False

    async def run(self) -> None:
        """Synchronises until cancelled."""
        while True:
            try:
                await self.sync()
            except FulmenError as error:
                if not self._store_unavailable:
                    _log.warning("usage_sync_failed", reason=error.reason)
                self._store_unavailable = True
            else:
                self._store_unavailable = False
            await asyncio.sleep(self._interval_s)

    async def flush(self) -> None:
        """Waits until the store has all usage, or does not accept any. The caller sets the deadline."""
        while not self._usage.is_empty:
            try:
                await self.sync()
            except Unimplemented:
                # A store of an earlier release.
                return
            except FulmenError:
                await asyncio.sleep(self._interval_s)

    async def sync(self) -> None:
        """Synchronises once.

        Raises:
            FulmenError: if the store did not answer; the next request repeats the batch.
        """
        async with self._lock:
            batch = self._usage.batch()
            slot, windows = self._limiter.windows()
            request = _request(self._instance_id, batch, slot, windows[:MAX_WINDOWS])
            sent = time.monotonic()
            try:
                answer = await self._stub.SyncUsage(request, timeout=DEADLINE_S)
            except ArgumentInvalid as error:
                # A retry would fail in the same way, and block everything behind it.
                _log.error("usage_refused", entries=len(request.usage), reason=str(error))
                self._usage.acknowledge()
                return
            self._usage.acknowledge()
            if answer.rejected_count:
                _log.warning("usage_of_unknown_projects", entries=answer.rejected_count)
            self._apply(answer, batch, windows, sent)

    def _apply(
        self,
        answer: usage_service_pb2.SyncUsageResponse,
        batch: UsageBatch | None,
        windows: Iterable[Window],
        sent: float,
    ) -> None:
        store_s = answer.store_time.ToNanoseconds() / 1e9
        if self._clock.sync(store_s, sent=sent, received=time.monotonic()):
            self._limiter.forget_minute()
        limits = {each.project: project_limits(each.limits) for each in answer.limits}
        self._limiter.set_projects({project: each for project, each in limits.items() if each})
        self._budgets.set_all({each.project: each.limits.budgets for each in answer.limits})
        self._limiter.apply_remote(int(store_s // SLOT_S), [_window(each) for each in answer.others])
        keys = {window.key[2]: window.key for window in windows if window.key[2]}
        stored = {keys[each.attempt]: each.token_count for each in answer.attempts if each.attempt in keys}
        self._limiter.apply_stored(_reported(batch), stored)


def project_limits(message: model_limits_pb2.ModelLimits) -> ProjectLimits:
    """Decodes the limits of a project."""
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


def _reported(batch: UsageBatch | None) -> dict[LimitKey, int]:
    reported: dict[LimitKey, int] = {}
    for (project, attempt, _, _), counts in ({} if batch is None else batch.counts).items():
        if attempt:
            key = (project, "", attempt)
            reported[key] = reported.get(key, 0) + counts.prompt + counts.completion
    return reported


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
        spend=[
            usage_service_pb2.SpendDelta(project=project, subject=subject, period=period, cost_micros=micros)  # type: ignore[arg-type]
            for (project, subject, period), micros in ({} if batch is None else batch.spend).items()
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
"""Smaller differences are attributed to network latency."""


class StoreClock:
    """The store's clock as known to this process, so that all processes start minutes at the same time.

    Advances by the monotonic clock from the store's last time; before that, from the system time.
    """

    def __init__(self, *, wall: Callable[[], float], monotonic: Callable[[], float]) -> None:
        """Sets the system clock (seconds since 1970) and the monotonic clock (seconds)."""
        self._monotonic = monotonic
        self._ahead_s = wall() - monotonic()

    def now(self) -> float:
        """Returns seconds since 1970."""
        return self._monotonic() + self._ahead_s

    def sync(self, store_s: float, *, sent: float, received: float) -> bool:
        """Adjusts to the store's time, read between two monotonic times; returns whether the clock moved back."""
        ahead_s = store_s - (sent + received) / 2
        step_s = ahead_s - self._ahead_s
        if abs(step_s) <= TOLERANCE_S + (received - sent) / 2:
            return False
        self._ahead_s = ahead_s
        return step_s < 0
