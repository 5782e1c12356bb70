"""Takes captures to the store, by way of the disk while the store is away.

As long as the store answers promptly, calls go from the queue straight to it. When it does not, what
was being sent is written to the spool first and everything newer behind it, while the spool's oldest
are sent again and again; when the spool is empty, calls go straight to the store as before. So one
order holds throughout, and little stays in memory that a kill could take.

Invariant: a call leaves the queue's account only when the store has acknowledged it or refused it
for good, or when it is on disk; it leaves the attempt's account only in the first two cases, or when
it is lost and counted as unusable. A disk that fails is told once and tried again; meanwhile calls
wait in memory, whose bound refuses new ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, TypeVar

import structlog

from fulmen.errors import FulmenError
from fulmen_llm_proxy.capture.finished_call import FinishedCall
from fulmen_llm_proxy.capture.ledger import AttemptLedger
from fulmen_llm_proxy.capture.packed import MAX_BATCH_BYTES, PackedCalls, Spool, SpoolFull
from fulmen_llm_proxy.capture.queue import CaptureQueue
from fulmen_llm_proxy.metrics.service import Metrics
from fulmen_llm_proxy.routing.retry import RetryPolicy

_MAX_CALLS = 256
_LINGER_S = 0.1
"""How long calls are gathered before they go unless somebody waits for them: a request of many costs little more than
a request of one, which would cost as much as the capture of its call."""
_PATIENCE_S = 1.0
"""How long the store may take for one request before the disk takes over."""
_DISK_RETRY_S = 2.0
_SYNC_AFTER_S = 1.0
"""After how long without new calls what was written is made to survive a loss of power."""
_READ_TRIES = 3
REJECTED = "store_rejected"

_Result = TypeVar("_Result")
_log = structlog.get_logger(__name__)


class Sender(Protocol):
    """The way to the store."""

    def pack(self, calls: list[FinishedCall]) -> list[PackedCalls]:
        """Packs calls into chunks with their final ids."""
        ...

    async def send(self, packed: list[PackedCalls]) -> Mapping[str, str]:
        """Sends chunks once; returns why the store refused some for good, by chunk id.

        Raises:
            FulmenError: if the store did not acknowledge them.
        """
        ...

    def close(self) -> None:
        """Drops the connection's stream."""
        ...


@dataclass(slots=True, kw_only=True)
class _Batch:
    """Calls out of the queue; `left` is what is neither acknowledged nor on disk."""

    calls: list[FinishedCall]
    left: list[PackedCalls]


class CaptureDelivery:
    """The background role between the queue and the store."""

    def __init__(
        self,
        *,
        queue: CaptureQueue,
        ledger: AttemptLedger,
        sender: Sender,
        spool: Spool | None,
        retry: RetryPolicy,
        metrics: Metrics,
    ) -> None:
        self._queue = queue
        self._ledger = ledger
        self._sender = sender
        self._spool = spool
        self._retry = retry
        self._metrics = metrics
        self._held: _Batch | None = None
        self._idle = True
        self._news = asyncio.Event()
        self._room = asyncio.Event()
        self._disk_failing = False
        metrics.capture_bytes.set_function(lambda: queue.size_bytes)
        self._disk = ThreadPoolExecutor(max_workers=1, thread_name_prefix="spool")

    async def run(self) -> None:
        """Delivers until it is cancelled; what waits by then goes to the spool, or is lost without one."""
        try:
            if self._spool is None:
                await self._run_in_memory()
            else:
                await self._run_with(self._spool)
        finally:
            self._sender.close()
            await self._keep_the_rest()
            self._disk.shutdown(wait=True)

    async def _run_in_memory(self) -> None:
        while True:
            await self._gathered()
            batch = self._take()
            await self._send_until_acknowledged(batch.left)
            self._release(batch)

    async def _run_with(self, spool: Spool) -> None:
        delays = self._retry.delays(random.random)
        if not spool.is_empty:
            await self._catch_up(spool)
        while True:
            batch = self._held
            if batch is None:
                await self._gathered()
                batch = self._take()
            if await self._sent_promptly(batch):
                self._release(batch)
                delays = self._retry.delays(random.random)
            elif await self._kept(spool, batch):
                await self._catch_up(spool)
            else:
                await asyncio.sleep(next(delays))

    async def _gathered(self) -> None:
        await self._queue.filled()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LINGER_S):
                await self._queue.due()

    def _take(self) -> _Batch:
        calls = self._queue.take(max_calls=_MAX_CALLS, max_bytes=MAX_BATCH_BYTES)
        self._held = _Batch(calls=calls, left=self._sender.pack(calls))
        return self._held

    def _release(self, batch: _Batch) -> None:
        self._held = None
        self._queue.release(batch.calls)

    async def _sent_promptly(self, batch: _Batch) -> bool:
        """Sends once; gives up when the store takes long or the queue fills up meanwhile."""
        sending = asyncio.create_task(self._sender.send(batch.left), name="send-captures")
        crowded = asyncio.create_task(self._queue.crowded(), name="queue-crowded")
        try:
            await asyncio.wait({sending, crowded}, timeout=_PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
            if not sending.done():
                return False
            self._account(batch.left, await sending)
        except FulmenError as error:
            _log.warning("store_is_away", reason=error.reason)
            return False
        finally:
            crowded.cancel()
            await _end(sending)
        return True

    async def _send_until_acknowledged(self, packed: list[PackedCalls]) -> None:
        delays = self._retry.delays(random.random)
        while packed:
            try:
                rejected = await self._sender.send(packed)
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

    async def _kept(self, spool: Spool, batch: _Batch) -> bool:
        """Writes a batch to the disk; False if it has no room for it, or fails."""
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

    async def _catch_up(self, spool: Spool) -> None:
        """Sends what is on disk, oldest first, while new calls are written behind it; returns when all is sent."""
        _log.info("spool_takes_over")
        async with asyncio.TaskGroup() as group:
            intake = group.create_task(self._intake(spool), name="spool-intake")
            while not (spool.is_empty and self._idle):
                if spool.is_empty:
                    self._news.clear()
                    await self._news.wait()
                elif packed := await self._head(spool):
                    await self._send_until_acknowledged(packed)
                    await self._disk_step(spool, spool.acknowledge)
                    self._room.set()
            intake.cancel()
        _log.info("spool_is_empty")

    async def _intake(self, spool: Spool) -> None:
        while True:
            self._idle = True
            self._news.set()
            batch = self._held
            if batch is None:
                await self._gathered_or_synced(spool)
                batch = self._take()
            self._idle = False
            while not await self._kept(spool, batch):
                # While it waits here, it may be ended: what it holds is then sent from memory.
                self._idle = True
                self._news.set()
                self._room.clear()
                try:
                    async with asyncio.timeout(_DISK_RETRY_S):
                        await self._room.wait()
                except TimeoutError:
                    pass
                self._idle = False

    async def _gathered_or_synced(self, spool: Spool) -> None:
        while spool.is_dirty:
            try:
                async with asyncio.timeout(_SYNC_AFTER_S):
                    await self._gathered()
                    return
            except TimeoutError:
                await self._disk_step(spool, spool.sync)
        await self._gathered()

    async def _head(self, spool: Spool) -> list[PackedCalls]:
        """Returns the oldest on disk; a file that cannot be read in several tries is left aside."""
        for _ in range(_READ_TRIES):
            try:
                packed = await self._on_disk(spool, spool.read)
            except OSError as error:
                self._disk_error(error)
                await asyncio.sleep(_DISK_RETRY_S)
            else:
                if not packed:
                    await self._disk_step(spool, spool.acknowledge)
                return packed
        await self._disk_step(spool, spool.give_up_head)
        return []

    async def _disk_step(self, spool: Spool, step: Callable[[], None]) -> None:
        try:
            await self._on_disk(spool, step)
        except OSError as error:
            self._disk_error(error)
            await asyncio.sleep(_DISK_RETRY_S)

    async def _on_disk(self, spool: Spool, step: Callable[[], _Result]) -> _Result:
        """Runs a step in the disk's thread, then tells what was lost in it."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._disk, step)
        finally:
            self.tell_losses(spool)

    def tell_losses(self, spool: Spool) -> None:
        """Puts what the spool lost on the attempts' accounts."""
        for loss in spool.take_losses():
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
            _log.info("spool_disk_works_again")

    async def _keep_the_rest(self) -> None:
        """Writes what is still in memory to the disk, at the end."""
        lost = 0
        while self._held is not None or self._queue.has_calls:
            batch = self._held or self._take()
            if self._spool is None or not await self._kept(self._spool, batch):
                lost += len(batch.calls)
                self._release(batch)
        if lost:
            _log.error("captures_lost", reason="stopped", calls=lost)
            self._metrics.dropped("stopped", lost)


async def _end(task: asyncio.Task[Mapping[str, str]]) -> None:
    """Cancels a task and waits for its end; its outcome is known or of no use by then."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
