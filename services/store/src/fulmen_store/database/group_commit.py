"""Group commit: rows submitted while a commit runs go into the next one.

Invariant: a caller is answered only after its own commit. There is no timer: an idle store has the latency of one
commit, a loaded one batches by itself. Projects fill a batch in turns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from fulmen.errors import DatabaseUnavailable, FulmenError
from fulmen_service_kit.security.auth import current_tenant
from fulmen_service_kit.security.fair_turns import FairQueue
from fulmen_store.metrics import StoreMetrics

__all__ = ["GroupCommitter"]

MAX_BATCH_ROWS: Final = 1000
MAX_BATCH_BYTES: Final = 4 * 1024 * 1024
TURNS_TO_COLLECT: Final = 2

RowT = TypeVar("RowT")
AnswerT = TypeVar("AnswerT")


@dataclass(slots=True, kw_only=True)
class _Ticket(Generic[RowT, AnswerT]):
    rows: Sequence[RowT]
    size_bytes: int
    answer: asyncio.Future[list[AnswerT]]


class GroupCommitter(Generic[RowT, AnswerT]):
    """Combines many small writes into few statements, one commit each.

    If a batch fails because of one caller's rows, each caller's rows are committed separately, so that no caller fails
    because of another.
    """

    def __init__(
        self,
        name: str,
        execute: Callable[[Sequence[RowT]], Awaitable[Sequence[AnswerT]]],
        *,
        max_rows: int = MAX_BATCH_ROWS,
        max_bytes: int = MAX_BATCH_BYTES,
        metrics: StoreMetrics | None = None,
    ) -> None:
        """Creates a committer without pending rows.

        Args:
            name: Name of the work, for metrics.
            execute: Commits rows and returns one answer per row, in order.
            max_rows: Maximum rows per commit, unless one caller alone submits more; 1,000 by default.
            max_bytes: Maximum bytes per commit, likewise; 4 MiB by default.
            metrics: Instruments; by default none.
        """
        self.name = name
        self._execute = execute
        self._max_rows = max_rows
        self._max_bytes = max_bytes
        self._metrics = metrics
        self._waiting: FairQueue[_Ticket[RowT, AnswerT]] = FairQueue()
        self._arrived = asyncio.Event()
        self._stopped = False

    async def submit(self, rows: Sequence[RowT], *, size_bytes: int = 0) -> list[AnswerT]:
        """Commits rows together with other pending ones; returns their answers after the commit.

        Raises:
            DatabaseUnavailable: If the commit did not finish in time or the database is unavailable. The rows may or may
                not be committed: every write behind a committer can be repeated.
        """
        if not rows:
            return []
        if self._stopped:
            raise DatabaseUnavailable("The store is shutting down.")
        ticket: _Ticket[RowT, AnswerT] = _Ticket(
            rows=rows, size_bytes=size_bytes, answer=asyncio.get_running_loop().create_future()
        )
        self._waiting.put(current_tenant(), ticket)
        self._arrived.set()
        # The wait is bounded: every statement of the previous batch and of this one has a timeout.
        return await ticket.answer

    async def run(self) -> None:
        """Background role: commits batches until cancelled."""
        batch: list[_Ticket[RowT, AnswerT]] = []
        try:
            while True:
                await self._arrived.wait()
                # Requests that have already reached the process join this batch: a statement costs as much as fifty rows.
                for _ in range(TURNS_TO_COLLECT):
                    await asyncio.sleep(0)
                batch = self._take()
                if batch:
                    await self._commit(batch)
        finally:
            self._stopped = True
            while self._waiting:
                batch.append(self._waiting.take())
            for ticket in batch:
                _fail(ticket, DatabaseUnavailable("The store is shutting down."))

    def _take(self) -> list[_Ticket[RowT, AnswerT]]:
        batch: list[_Ticket[RowT, AnswerT]] = []
        rows = size_bytes = 0
        while self._waiting:
            ticket = self._waiting.first()
            rows += len(ticket.rows)
            size_bytes += ticket.size_bytes
            if batch and (rows > self._max_rows or size_bytes > self._max_bytes):
                return batch
            self._waiting.take()
            if not ticket.answer.done():
                batch.append(ticket)
        self._arrived.clear()
        return batch

    async def _commit(self, batch: list[_Ticket[RowT, AnswerT]]) -> None:
        rows = [row for ticket in batch for row in ticket.rows]
        try:
            answers = list(await self._execute(rows))
        except DatabaseUnavailable as error:
            for ticket in batch:
                _fail(ticket, error)
            return
        except FulmenError as error:
            if len(batch) == 1:
                _fail(batch[0], error)
                return
            for ticket in batch:
                await self._commit([ticket])
            return
        if self._metrics is not None:
            self._metrics.batch(self.name, len(rows))
        start = 0
        for ticket in batch:
            end = start + len(ticket.rows)
            if not ticket.answer.done():
                ticket.answer.set_result(answers[start:end])
            start = end


def _fail(ticket: _Ticket[RowT, AnswerT], error: FulmenError) -> None:
    if not ticket.answer.done():
        ticket.answer.set_exception(error)
