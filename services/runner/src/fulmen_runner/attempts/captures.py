"""Asks the model proxies for their capture summaries, in batches of attempts.

Any proxy answers for all that ever served an attempt: they keep their accounts in the store. So proxies may come and go, and
one address may stand for all of them.

Invariant: a summary is returned only when a proxy has confirmed it within the deadline. Otherwise CapturesUnavailable is
raised.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

import structlog

from fulmen.errors import DeadlineExceeded, FulmenError, PermissionDenied, TokenInvalid, Unavailable
from fulmen.llm_proxy.v1 import capture_service_pb2, capture_service_pb2_grpc
from fulmen.rpc.channel import FulmenChannel
from fulmen_runner.attempts.classification import CaptureEvidence
from fulmen_runner.attempts.errors import CapturesUnavailable

MAX_ATTEMPTS_PER_CALL = 1000
COALESCE_S = 0.002
CALL_TIMEOUT_S = 5.0
SLOW_S = 1.0
"""Time after which an answer counts as none for a moment: packets were lost, and sent again."""
RETRY_PAUSE_S = 0.1
REACHED_FRESH_S = 1.0
"""Time for which a proxy that answered counts as reached."""

_log = structlog.get_logger()

Summary = capture_service_pb2.CaptureSummary
_Answer = TypeVar("_Answer")


@dataclass(slots=True, kw_only=True)
class _Waiter:
    attempt: str
    deadline: float
    done: "asyncio.Future[Summary]"


@dataclass(slots=True)
class ProxyCaptures:
    """Client of one address of proxies. Flushes are collected for `COALESCE_S` and sent in batches.

    Attributes:
        unreachable_at: When it last did not answer within `SLOW_S`, monotonic seconds.
    """

    target: str
    channel: FulmenChannel
    unreachable_at: float = float("-inf")
    _waiting: list[_Waiter] = field(default_factory=list)
    _collecting: asyncio.Task[None] | None = None
    _asking: asyncio.Task[None] | None = None
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _reached_s: float = float("-inf")

    async def reach(self, deadline: float) -> None:
        """Waits until a proxy answers, or returns immediately if one has within `REACHED_FRESH_S`.

        Args:
            deadline: Time limit, monotonic seconds.

        Raises:
            CapturesUnavailable: If the proxy does not answer before the deadline.
        """
        if time.monotonic() - self._reached_s < REACHED_FRESH_S:
            return
        if self._asking is None:
            self._asking = asyncio.create_task(self._reach(deadline), name=f"reach {self.target}")
            self._asking.add_done_callback(self._asked)
        await asyncio.shield(self._asking)

    async def flush(self, attempt: str, deadline: float) -> Summary:
        """Waits until the attempt's spans are stored, or known to be lost; returns its summary.

        Args:
            attempt: Name of the attempt.
            deadline: Time limit, monotonic seconds.

        Raises:
            CapturesUnavailable: If the proxy does not confirm before the deadline.
        """
        done: asyncio.Future[Summary] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiter(attempt=attempt, deadline=deadline, done=done))
        if self._collecting is None:
            self._collecting = asyncio.create_task(self._collect(), name=f"flush of {self.target}")
        return await done

    async def close(self) -> None:
        """Cancels pending calls and closes the channel."""
        tasks = [task for task in (self._collecting, self._asking, *self._tasks) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.channel.close()

    def _asked(self, task: "asyncio.Task[None]") -> None:
        self._asking = None
        if not task.cancelled():
            task.exception()

    async def _reach(self, deadline: float) -> None:
        while True:
            try:
                await self._call([], deadline)
            except FulmenError as error:
                self._log_refusal(error)
                if time.monotonic() + RETRY_PAUSE_S >= deadline:
                    message = f"model proxy {self.target} is unreachable: {error.message}"
                    raise CapturesUnavailable(message) from None
                await asyncio.sleep(RETRY_PAUSE_S)
            else:
                return

    async def _collect(self) -> None:
        await asyncio.sleep(COALESCE_S)
        waiting, self._waiting, self._collecting = self._waiting, [], None
        for start in range(0, len(waiting), MAX_ATTEMPTS_PER_CALL):
            batch = waiting[start : start + MAX_ATTEMPTS_PER_CALL]
            task = asyncio.create_task(self._flush_batch(batch), name=f"flush of {self.target}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _flush_batch(self, waiting: list[_Waiter]) -> None:
        while waiting := self._still_waiting(waiting):
            deadline = max(waiter.deadline for waiter in waiting)
            try:
                answer = await self._call([waiter.attempt for waiter in waiting], deadline)
            except FulmenError as error:
                self._log_refusal(error)
                _log.warning("capture_flush_failed", target=self.target, error=error.message, attempts=len(waiting))
            else:
                for waiter, summary in zip(waiting, answer.summaries, strict=True):
                    if summary.flushed and not waiter.done.done():
                        waiter.done.set_result(summary)
            if any(not waiter.done.done() for waiter in waiting):
                await asyncio.sleep(RETRY_PAUSE_S)

    def _still_waiting(self, waiting: list[_Waiter]) -> list[_Waiter]:
        now = time.monotonic()
        for waiter in waiting:
            if not waiter.done.done() and now >= waiter.deadline:
                message = f"model proxy {self.target} did not confirm in time that all spans are stored"
                waiter.done.set_exception(CapturesUnavailable(message))
        return [waiter for waiter in waiting if not waiter.done.done()]

    async def _call(self, attempts: list[str], deadline: float) -> capture_service_pb2.FlushCapturesResponse:
        stub = capture_service_pb2_grpc.CaptureServiceStub(self.channel)
        request = capture_service_pb2.FlushCapturesRequest(attempts=attempts)
        began = time.monotonic()
        timeout_s = min(CALL_TIMEOUT_S, max(0.05, deadline - began))
        try:
            answer = await stub.FlushCaptures(request, timeout=timeout_s)
        except FulmenError as error:
            self._reached_s = float("-inf")
            if isinstance(error, (Unavailable, DeadlineExceeded)):
                self.unreachable_at = time.monotonic()
            raise
        self._reached_s = time.monotonic()
        if self._reached_s - began > SLOW_S:
            self.unreachable_at = self._reached_s
        return answer

    def _log_refusal(self, error: FulmenError) -> None:
        if isinstance(error, (TokenInvalid, PermissionDenied)):
            _log.error("capture_flush_refused", target=self.target, error=error.message)


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureClient:
    """Client of all proxies that agents may call.

    Attributes:
        proxies: Addresses, each of one proxy or of all. May be empty; then nothing is waited for.
        reach_s: Timeout for reaching a proxy when an attempt starts, in seconds.
        flush_s: Timeout for storing an attempt's spans when it ends, in seconds.
    """

    proxies: tuple[ProxyCaptures, ...]
    reach_s: float
    flush_s: float

    async def reach(self) -> None:
        """Waits until a proxy answers.

        Raises:
            CapturesUnavailable: If none is reached in time.
        """
        deadline = time.monotonic() + self.reach_s
        if self.proxies:
            await self._first(lambda proxy: proxy.reach(deadline))

    async def flush(self, attempt: str) -> CaptureEvidence:
        """Waits until the attempt's spans are stored, or known to be lost; returns its summary.

        Raises:
            CapturesUnavailable: If no proxy confirms in time.
        """
        if not self.proxies:
            return CaptureEvidence()
        deadline = time.monotonic() + self.flush_s
        summary = await self._first(lambda proxy: proxy.flush(attempt, deadline))
        return CaptureEvidence(
            lost=summary.lost,
            unreachable_at=max(proxy.unreachable_at for proxy in self.proxies),
            call_count=summary.call_count,
            infra_failure_count=summary.infra_failure_count,
            prompt_token_count=summary.prompt_token_count,
            completion_token_count=summary.completion_token_count,
            throttled_count=summary.throttled_count,
        )

    async def _first(self, ask: Callable[[ProxyCaptures], Coroutine[Any, Any, _Answer]]) -> _Answer:
        """Returns the first answer. Asks the next address, too, when those that were asked take longer than `SLOW_S`.

        Raises:
            CapturesUnavailable: If none answers in time.
        """
        asked: list[asyncio.Task[_Answer]] = []
        try:
            for proxy in sorted(self.proxies, key=lambda proxy: proxy.unreachable_at):
                asked.append(asyncio.create_task(ask(proxy), name=f"ask {proxy.target}"))
                await asyncio.wait(asked, timeout=SLOW_S, return_when=asyncio.FIRST_COMPLETED)
                if any(task.done() and task.exception() is None for task in asked):
                    break
            for answered in asyncio.as_completed(asked):
                try:
                    return await answered
                except CapturesUnavailable as error:
                    last = error
            raise last
        finally:
            for task in asked:
                task.cancel()
