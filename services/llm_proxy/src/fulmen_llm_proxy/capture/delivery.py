"""Delivers captures to the store, through the disk while the store is unavailable.

While the store answers promptly, calls go from the queue straight to it. When it does not, the batch in flight is
written to the spool first and all newer calls after it, while the oldest calls of the spool are sent repeatedly. Once
the spool is empty, calls go straight to the store again. Calls keep their order, and a kill loses only
the few calls in memory.

Invariant: a call leaves the queue only when the store has acknowledged or permanently refused it, or when it is on
disk; it leaves the attempt's ledger only in the first two cases, or when it is lost and counted as unusable. A disk
failure is logged once and retried; meanwhile calls wait in memory, and a full queue refuses new ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import structlog

from fulmen.errors import FulmenError
from fulmen_llm_proxy.capture.capture_queue import CaptureQueue
from fulmen_llm_proxy.capture.finished_call import FinishedCall
from fulmen_llm_proxy.capture.ledger import AttemptLedger
from fulmen_llm_proxy.capture.packed import MAX_BATCH_BYTES, PackedCalls, SpoolFull
from fulmen_llm_proxy.capture.shipper import SpanShipper
from fulmen_llm_proxy.capture.spool import DiskSpool
from fulmen_llm_proxy.metrics.captures import CaptureMetrics
from fulmen_llm_proxy.routing.retry import RetryPolicy

_MAX_CALLS = 256
_LINGER_S = 0.1
"""Time for which calls are collected into a batch unless a flush waits, seconds; larger requests cost little more."""
_PATIENCE_S = 1.0
"""Timeout of a request to the store, after which calls go to the disk, seconds."""
_DISK_RETRY_S = 2.0
_SYNC_AFTER_S = 1.0
"""Idle time after which the spool is synced to disk, seconds."""
_READ_TRIES = 3
REJECTED = "store_rejected"

_Result = TypeVar("_Result")
_log = structlog.get_logger(__name__)


@dataclass(slots=True, kw_only=True)
class _Batch:
    """Calls taken from the queue; `left` are those neither acknowledged nor on disk."""

    calls: list[FinishedCall]
    left: list[PackedCalls]


class CaptureDelivery:
    """Background role: delivers the queue to the store."""

    def __init__(
        self,
        *,
        queue: CaptureQueue,
        ledger: AttemptLedger,
        shipper: SpanShipper,
        spool: DiskSpool | None,
        retry: RetryPolicy,
        metrics: CaptureMetrics,
    ) -> None:
        self._queue = queue
        self._ledger = ledger
        self._shipper = shipper
        self._spool = spool
        self._retry = retry
        self._metrics = metrics
        self._held: _Batch | None = None
        self._idle = True
        self._changed = asyncio.Event()
        self._room = asyncio.Event()
        self._disk_failing = False
        metrics.queue_bytes.set_function(lambda: queue.size_bytes)
        self._disk = ThreadPoolExecutor(max_workers=1, thread_name_prefix="spool")

    async def run(self) -> None:
        """Delivers until cancelled; the remaining calls then go to the spool, or are lost without one."""
        try:
            if self._spool is None:
                await self._run_in_memory()
            else:
                await self._run_with(self._spool)
        finally:
            self._shipper.close()
            await self._write_rest()
            self._disk.shutdown(wait=True)

    async def _run_in_memory(self) -> None:
        while True:
            await self._wait()
            batch = self._next_batch()
            await self._send_until_acknowledged(batch.left)
            self._release(batch)

    async def _run_with(self, spool: DiskSpool) -> None:
        delays = self._retry.delays(random.random)
        if not spool.is_empty:
            await self._catch_up(spool)
        while True:
            batch = self._held
            if batch is None:
                await self._wait()
                batch = self._next_batch()
            if await self._sent_promptly(batch):
                self._release(batch)
                delays = self._retry.delays(random.random)
            elif await self._write(spool, batch):
                await self._catch_up(spool)
            else:
                await asyncio.sleep(next(delays))

    async def _wait(self) -> None:
        await self._queue.filled()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LINGER_S):
                await self._queue.due()

    def _next_batch(self) -> _Batch:
        calls = self._queue.take(max_calls=_MAX_CALLS, max_bytes=MAX_BATCH_BYTES)
        self._held = _Batch(calls=calls, left=self._shipper.pack(calls))
        return self._held

    def _release(self, batch: _Batch) -> None:
        self._held = None
        self._queue.release(batch.calls)

    async def _sent_promptly(self, batch: _Batch) -> bool:
        """Sends once; gives up if the store is slow or the queue fills up meanwhile."""
        sending = asyncio.create_task(self._shipper.send(batch.left), name="send-captures")
        crowded = asyncio.create_task(self._queue.crowded(), name="queue-crowded")
        try:
            await asyncio.wait({sending, crowded}, timeout=_PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
            if not sending.done():
                return False
            self._account(batch.left, await sending)
        except FulmenError as error:
            _log.warning("store_unavailable", reason=error.reason)
            return False
        finally:
            crowded.cancel()
            await _end(sending)
        return True

    async def _send_until_acknowledged(self, packed: list[PackedCalls]) -> None:
        delays = self._retry.delays(random.random)
        while packed:
            try:
                rejected = await self._shipper.send(packed)
            except FulmenError as error:
                delay_s = next(delays)
                _log.warning("captures_wait_for_store", reason=error.reason, retry_in_s=round(delay_s, 3))
                await asyncio.sleep(delay_s)
            else:
                self._account(packed, rejected)
                return

    def _account(self, packed: list[PackedCalls], rejected: Mapping[str, str]) -> None:
        for one in packed:
            reason = rejected.get(one.chunk_id)
            if reason is not None:
                _log.error("captures_rejected", attempt=one.attempt, calls=one.calls, reason=reason)
                self._metrics.dropped(REJECTED, one.calls)
            if one.captured:
                unusable = one.captured if reason is not None else one.unusable
                self._metrics.judged(usable=one.captured - unusable, unusable=unusable)
            self._ledger.delivered(
                one.attempt,
                calls=one.calls,
                unusable=one.unusable if reason is None else one.calls,
                prompt_tokens=one.prompt_tokens,
                completion_tokens=one.completion_tokens,
            )

    async def _write(self, spool: DiskSpool, batch: _Batch) -> bool:
        """Writes a batch to disk; False if the spool is full or the disk fails."""
        waiting = sum(one.calls for one in batch.left)
        try:
            await self._on_disk(spool, lambda: spool.append(batch.left))
        except (SpoolFull, OSError) as error:
            if isinstance(error, OSError):
                self._disk_error(error)
            self._metrics.spooled(waiting - sum(one.calls for one in batch.left))
            return False
        self._disk_works()
        self._metrics.spooled(waiting)
        self._release(batch)
        return True

    async def _catch_up(self, spool: DiskSpool) -> None:
        """Sends the calls on disk, oldest first, while new ones are appended; returns when all are sent."""
        _log.info("spooling_started")
        async with asyncio.TaskGroup() as group:
            intake = group.create_task(self._intake(spool), name="spool-intake")
            while not (spool.is_empty and self._idle):
                if spool.is_empty:
                    self._changed.clear()
                    await self._changed.wait()
                elif packed := await self._head(spool):
                    await self._send_until_acknowledged(packed)
                    await self._disk_operation(spool, spool.acknowledge)
                    self._room.set()
            intake.cancel()
        _log.info("spooling_ended")

    async def _intake(self, spool: DiskSpool) -> None:
        while True:
            self._idle = True
            self._changed.set()
            batch = self._held
            if batch is None:
                await self._wait_or_sync(spool)
                batch = self._next_batch()
            self._idle = False
            while not await self._write(spool, batch):
                # While waiting it may be cancelled; its batch is then sent from memory.
                self._idle = True
                self._changed.set()
                self._room.clear()
                try:
                    async with asyncio.timeout(_DISK_RETRY_S):
                        await self._room.wait()
                except TimeoutError:
                    pass
                self._idle = False

    async def _wait_or_sync(self, spool: DiskSpool) -> None:
        while spool.is_dirty:
            try:
                async with asyncio.timeout(_SYNC_AFTER_S):
                    await self._wait()
                    return
            except TimeoutError:
                await self._disk_operation(spool, spool.sync)
        await self._wait()

    async def _head(self, spool: DiskSpool) -> list[PackedCalls]:
        """Returns the oldest calls on disk; sets a file aside that cannot be read after several tries."""
        for _ in range(_READ_TRIES):
            try:
                packed = await self._on_disk(spool, spool.read)
            except OSError as error:
                self._disk_error(error)
                await asyncio.sleep(_DISK_RETRY_S)
            else:
                if not packed:
                    await self._disk_operation(spool, spool.acknowledge)
                return packed
        await self._disk_operation(spool, spool.give_up_head)
        return []

    async def _disk_operation(self, spool: DiskSpool, operation: Callable[[], None]) -> None:
        try:
            await self._on_disk(spool, operation)
        except OSError as error:
            self._disk_error(error)
            await asyncio.sleep(_DISK_RETRY_S)

    async def _on_disk(self, spool: DiskSpool, operation: Callable[[], _Result]) -> _Result:
        """Runs an operation in the disk thread, then reports its losses."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._disk, operation)
        finally:
            self.report_losses(spool)

    def report_losses(self, spool: DiskSpool) -> None:
        """Counts the spool's losses in metrics and in the attempts' ledger."""
        for loss in spool.drain_losses():
            _log.error("captures_lost", reason=loss.reason, attempt=loss.attempt, calls=loss.calls)
            self._metrics.dropped(loss.reason, loss.calls)
            if loss.attempt:
                self._ledger.delivered(loss.attempt, calls=loss.calls, unusable=loss.calls)

    def _disk_error(self, error: OSError) -> None:
        self._metrics.disk_failed()
        if not self._disk_failing:
            self._disk_failing = True
            _log.error("spool_disk_failed", errno=error.errno, error=error.strerror)

    def _disk_works(self) -> None:
        if self._disk_failing:
            self._disk_failing = False
            _log.info("spool_disk_recovered")

    async def _write_rest(self) -> None:
        """Writes the calls in memory to disk at shutdown."""
        lost = 0
        while self._held is not None or self._queue.has_calls:
            batch = self._held or self._next_batch()
            if self._spool is None or not await self._write(self._spool, batch):
                lost += len(batch.calls)
                self._release(batch)
        if lost:
            _log.error("captures_lost", reason="stopped", calls=lost)
            self._metrics.dropped("stopped", lost)


async def _end(task: asyncio.Task[Mapping[str, str]]) -> None:
    """Cancels a task and waits for its end; its outcome is already known or irrelevant."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
