"""The shards that a server holds: applies the effects of their round machines and passes responses to streams.

Invariant: a shard's round machine changes on the event loop only; payloads are decoded and summed in the shard's thread, one
sum at a time, in the order in which they became due.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import structlog

from fulmen.errors import Draining, FulmenError, InternalError, QuotaExceeded, Unavailable
from fulmen_exchange.aggregator.effects import (
    Chunk,
    Effect,
    JoinResult,
    PayloadStatus,
    Response,
    ResumePoint,
    StagingFull,
    SumDue,
)
from fulmen_exchange.aggregator.held_folder import FolderLost, HeldFolder
from fulmen_exchange.aggregator.rounds import RoundMachine

if TYPE_CHECKING:
    from fulmen_exchange.aggregator.shard_sum import ShardSum

BOUNDS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
HELD_BYTES_SETTING = "FULMEN_ALGORITHM_EXCHANGE_MAX_HELD_BYTES"
MAX_UNREAD = 256
"""Responses that may wait for a stream; sums are not copied for it."""

_log = structlog.get_logger()


@dataclass(slots=True)
class Tally:
    """Counters of one shard since it was opened.

    Attributes:
        statuses: Payloads and chunks by status.
        rounds: Completed rounds by the first of `BOUNDS_S` not below their duration; the last entry exceeds all bounds.
        seconds: Total duration of these rounds.
    """

    statuses: Counter[PayloadStatus] = field(default_factory=Counter)
    rounds: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_S) + 1))
    seconds: float = 0.0
    _counted: int = 0

    def update(self, machine: RoundMachine) -> None:
        """Counts the rounds completed since the last call: a round is complete once the next one begins."""
        completed = [record for number, record in machine.records.items() if self._counted < number < machine.round]
        self._counted = max(self._counted, machine.round - 1)
        for record in completed:
            if record.sums:
                seconds = record.ended_s - record.began_s
                self.seconds += seconds
                self.rounds[bisect_left(BOUNDS_S, seconds)] += 1


@dataclass(slots=True)
class Outbox:
    """Responses queued for one stream."""

    _answers: asyncio.Queue[Response | BaseException | None] = field(default_factory=asyncio.Queue)
    _is_ended: bool = False

    def put(self, answer: Response) -> None:
        """Queues a response; ends the stream if they are not being read."""
        if self._answers.qsize() >= MAX_UNREAD:
            self.end(Unavailable("The rank is not reading its responses."))
        elif not self._is_ended:
            self._answers.put_nowait(answer)

    def end(self, error: BaseException | None = None) -> None:
        """Ends the stream after the queued responses, with an error or normally."""
        if not self._is_ended:
            self._is_ended = True
            self._answers.put_nowait(error)

    async def next(self) -> Response | None:
        """Returns the next response; None at the end.

        Raises:
            BaseException: the error with which the stream was ended.
        """
        answer = await self._answers.get()
        if isinstance(answer, BaseException):
            raise answer
        return answer


class ServedShard:
    """One shard of one run.

    Attributes:
        machine: Its rounds.
        tally: Its counters.
        lost_residuals: How often its residual was lost.
        empty_since_s: Since when it has no members.
        is_lost: Whether another server has taken the shard, so that no more sums are made here.
    """

    def __init__(
        self, machine: RoundMachine, sums: ShardSum, *, clock: Callable[[], float], folder: HeldFolder | None = None
    ) -> None:
        """Starts the shard.

        Args:
            machine: Its rounds.
            sums: Makes its sums.
            clock: Returns the time in seconds.
            folder: The folder of its sums, released when the shard ends; None for none.
        """
        self.machine = machine
        self.tally = Tally()
        self.lost_residuals = 0
        self.empty_since_s = clock()
        self.is_lost = False
        self._error_id = ""
        self._folder = folder
        self._sums = sums
        self._clock = clock
        self._streams: dict[tuple[int, str], Outbox] = {}
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="exchange-shard")
        self._due: asyncio.Queue[SumDue] = asyncio.Queue()
        self._summing = asyncio.create_task(self._sum_due(), name="exchange-shard")

    @property
    def overflowed(self) -> int:
        """Number of elements that were left out of sums because they overflowed."""
        return self._sums.overflowed

    @property
    def held_bytes(self) -> int:
        """Memory that the shard may need for its sums and residuals, and holds for payloads and replies."""
        return self._sums.agreed_bytes + self.machine.held_bytes

    @property
    def is_broken(self) -> bool:
        """Whether a sum has failed, after which no more are made."""
        return bool(self._error_id)

    def join(self, rank: int, incarnation: str, resume_point: ResumePoint) -> JoinResult:
        """See `RoundMachine.join`."""
        joined, effects = self.machine.join(rank, incarnation, self._clock(), resume_point)
        self._apply(effects)
        return joined

    def leave(self, rank: int, incarnation: str) -> None:
        """See `RoundMachine.leave`."""
        self._apply(self.machine.leave(rank, incarnation, self._clock()))

    def open(self, rank: int, incarnation: str) -> Outbox:
        """Opens the stream of a rank; an older stream of the same process ends."""
        outbox = Outbox()
        if (older := self._streams.get((rank, incarnation))) is not None:
            older.end()
        self._streams[rank, incarnation] = outbox
        if self.is_broken or self.is_lost:
            outbox.end(self._failure())
        return outbox

    def close(self, rank: int, incarnation: str, outbox: Outbox) -> None:
        """Removes a stream."""
        if self._streams.get((rank, incarnation)) is outbox:
            del self._streams[rank, incarnation]

    def take(self, rank: int, incarnation: str, chunk: Chunk) -> None:
        """See `RoundMachine.take`.

        Raises:
            QuotaExceeded: if the server has no memory for another payload.
        """
        try:
            effects = self.machine.take(rank, incarnation, chunk, self._clock())
        except StagingFull:
            raise QuotaExceeded(
                f"The server has no memory for a payload of {chunk.total_bytes} bytes; raise its setting"
                f" {HELD_BYTES_SETTING}."
            ) from None
        self._apply(effects)

    def tick(self) -> None:
        """See `RoundMachine.tick`."""
        now_s = self._clock()
        self._apply(self.machine.tick(now_s))
        self.tally.update(self.machine)
        if self.machine.members.ranks:
            self.empty_since_s = now_s

    def drain(self) -> None:
        """Ends the streams; ranks reconnect when the server returns."""
        for outbox in list(self._streams.values()):
            outbox.end(Draining("The service is shutting down."))

    async def end(self) -> None:
        """Stops the shard."""
        self.drain()
        self._summing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._summing
        await asyncio.to_thread(self._thread.shutdown)
        if self._folder is not None:
            self._folder.release()

    def _apply(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, SumDue):
                self._due.put_nowait(effect)
                continue
            self.tally.statuses[effect.status] += 1
            if (outbox := self._streams.get((effect.rank, effect.incarnation))) is not None:
                outbox.put(effect)

    async def _sum_due(self) -> None:
        from fulmen_exchange.aggregator.shard_sum import PayloadsRefused  # loads torch

        loop = asyncio.get_running_loop()
        while True:
            due = await self._due.get()
            reduce = partial(self._sums.reduce, due, epoch=self.machine.members.epoch, history=self.machine.history)
            try:
                reply = await loop.run_in_executor(self._thread, reduce)
            except PayloadsRefused as error:
                self._apply(self.machine.refused(due.key, error.reasons, self._clock()))
            except FolderLost:
                self.is_lost = True
                _log.warning("exchange_shard_lost", round=due.key[0], call=due.key[1])
                self._end_streams()
                return
            except Exception:  # noqa: BLE001  (reported to all waiting ranks, now and later)
                self._error_id = uuid.uuid4().hex[:12]
                _log.exception("exchange_sum_failed", error_id=self._error_id, round=due.key[0], call=due.key[1])
                self._end_streams()
                return
            else:
                self._apply(self.machine.summed(due.key, reply, self._clock()))

    def _end_streams(self) -> None:
        for outbox in list(self._streams.values()):
            outbox.end(self._failure())

    def _failure(self) -> FulmenError:
        if self.is_lost:
            return Unavailable("Another server has taken the shard.")
        # With an id: without one, ranks take it for a broken connection and retry.
        text = f"A sum failed; see id {self._error_id} in the server's log. Restart the ranks."
        return InternalError(text, error_id=self._error_id)
