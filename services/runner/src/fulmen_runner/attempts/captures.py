"""Asks the model proxies what they recorded, for many attempts in one call.

Invariant: an answer is for exactly the attempts that were asked for, from every configured proxy; if one of them cannot
confirm within the deadline, the answer is CapturesUnavailable, never a guess.
"""

import asyncio
import time
from dataclasses import dataclass, field

import structlog

from fulmen.errors import FulmenError, PermissionDenied, TokenInvalid
from fulmen.llm_proxy.v1 import capture_service_pb2, capture_service_pb2_grpc
from fulmen.rpc.channel import FulmenChannel
from fulmen_runner.attempts.classification import CaptureEvidence, InstanceIds
from fulmen_runner.attempts.errors import CapturesUnavailable

MAX_ATTEMPTS_PER_CALL = 1000
COALESCE_S = 0.002
CALL_DEADLINE_S = 5.0
RETRY_PAUSE_S = 0.1
INSTANCE_FRESH_S = 1.0
"""How old a proxy's instance id may be when an attempt begins; an older proxy only makes the runner more careful."""

_log = structlog.get_logger()

Summary = capture_service_pb2.CaptureSummary


@dataclass(slots=True, kw_only=True)
class _Waiter:
    attempt: str
    deadline: float
    done: "asyncio.Future[tuple[str, Summary]]"


@dataclass(slots=True)
class ProxyCaptures:
    """One proxy. Calls are gathered for a moment and made in batches; several may be under way."""

    target: str
    channel: FulmenChannel
    _waiting: list[_Waiter] = field(default_factory=list)
    _gathering: asyncio.Task[None] | None = None
    _asking: asyncio.Task[str] | None = None
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _instance: str = ""
    _instance_seen_s: float = float("-inf")

    async def instance(self, deadline: float) -> str:
        """Returns the id of the proxy that runs now, at most `INSTANCE_FRESH_S` old.

        Raises:
            CapturesUnavailable: If it does not answer before the deadline (monotonic seconds).
        """
        if time.monotonic() - self._instance_seen_s < INSTANCE_FRESH_S:
            return self._instance
        if self._asking is None:
            self._asking = asyncio.create_task(self._ask_instance(deadline), name=f"instance of {self.target}")
            self._asking.add_done_callback(self._asked)
        return await asyncio.shield(self._asking)

    async def flush(self, attempt: str, deadline: float) -> tuple[str, Summary]:
        """Returns the instance id and the summary of an attempt, once its spans are stored.

        Raises:
            CapturesUnavailable: If the proxy does not confirm before the deadline (monotonic seconds).
        """
        done: asyncio.Future[tuple[str, Summary]] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiter(attempt=attempt, deadline=deadline, done=done))
        if self._gathering is None:
            self._gathering = asyncio.create_task(self._gather(), name=f"flush of {self.target}")
        return await done

    async def close(self) -> None:
        """Ends what is under way and closes the channel."""
        tasks = [task for task in (self._gathering, self._asking, *self._tasks) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.channel.close()

    def _asked(self, task: "asyncio.Task[str]") -> None:
        self._asking = None
        if not task.cancelled():
            task.exception()

    async def _ask_instance(self, deadline: float) -> str:
        while True:
            try:
                await self._call([], deadline)
            except FulmenError as error:
                self._refused_for_good(error)
                if time.monotonic() + RETRY_PAUSE_S >= deadline:
                    message = f"The model proxy at {self.target} cannot be reached: {error.message}"
                    raise CapturesUnavailable(message) from None
                await asyncio.sleep(RETRY_PAUSE_S)
            else:
                return self._instance

    async def _gather(self) -> None:
        await asyncio.sleep(COALESCE_S)
        waiting, self._waiting, self._gathering = self._waiting, [], None
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
                self._refused_for_good(error)
                _log.warning("capture_flush_failed", target=self.target, error=error.message, attempts=len(waiting))
            else:
                for waiter, summary in zip(waiting, answer.summaries, strict=True):
                    if summary.flushed and not waiter.done.done():
                        waiter.done.set_result((answer.instance_id, summary))
            if any(not waiter.done.done() for waiter in waiting):
                await asyncio.sleep(RETRY_PAUSE_S)

    def _still_waiting(self, waiting: list[_Waiter]) -> list[_Waiter]:
        now = time.monotonic()
        for waiter in waiting:
            if not waiter.done.done() and now >= waiter.deadline:
                message = f"The model proxy at {self.target} did not confirm in time that all spans are stored."
                waiter.done.set_exception(CapturesUnavailable(message))
        return [waiter for waiter in waiting if not waiter.done.done()]

    async def _call(self, attempts: list[str], deadline: float) -> capture_service_pb2.FlushCapturesResponse:
        stub = capture_service_pb2_grpc.CaptureServiceStub(self.channel)
        request = capture_service_pb2.FlushCapturesRequest(attempts=attempts)
        timeout_s = min(CALL_DEADLINE_S, max(0.05, deadline - time.monotonic()))
        try:
            answer = await stub.FlushCaptures(request, timeout=timeout_s)
        except FulmenError:
            self._instance_seen_s = float("-inf")
            raise
        self._instance, self._instance_seen_s = answer.instance_id, time.monotonic()
        return answer

    def _refused_for_good(self, error: FulmenError) -> None:
        if isinstance(error, (TokenInvalid, PermissionDenied)):
            _log.error("capture_flush_refused", target=self.target, error=error.message)


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureClient:
    """All proxies that agents may have talked to. Without any, there is nothing to wait for.

    Attributes:
        reach_s: How long an attempt waits for the proxies before it begins.
        flush_s: How long it waits for its spans at its end.
    """

    proxies: tuple[ProxyCaptures, ...]
    reach_s: float
    flush_s: float

    async def instances(self) -> InstanceIds:
        """Returns the instance of each proxy.

        Raises:
            CapturesUnavailable: If one cannot be reached in time.
        """
        deadline = time.monotonic() + self.reach_s
        return tuple([await proxy.instance(deadline) for proxy in self.proxies])

    async def flush(self, attempt: str) -> CaptureEvidence:
        """Returns what the proxies recorded of an attempt, once all of it is stored.

        Raises:
            CapturesUnavailable: If one does not confirm in time.
        """
        if not self.proxies:
            return CaptureEvidence()
        deadline = time.monotonic() + self.flush_s
        answers = await asyncio.gather(*(proxy.flush(attempt, deadline) for proxy in self.proxies))
        return CaptureEvidence(
            instance_ids=tuple(instance for instance, _ in answers),
            call_count=sum(summary.call_count for _, summary in answers),
            infra_failure_count=sum(summary.infra_failure_count for _, summary in answers),
            prompt_token_count=sum(summary.prompt_token_count for _, summary in answers),
            completion_token_count=sum(summary.completion_token_count for _, summary in answers),
            throttled_count=sum(summary.throttled_count for _, summary in answers),
        )
