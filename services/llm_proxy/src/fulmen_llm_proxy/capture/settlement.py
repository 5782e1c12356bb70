"""Waits until the store has every capture of attempts, whichever processes served them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from fulmen.errors import FulmenError
from fulmen.store.v1 import proxy_service_pb2 as pb
from fulmen_llm_proxy.capture.accounts import CaptureAccounts
from fulmen_llm_proxy.capture.capture_queue import CaptureQueue
from fulmen_llm_proxy.capture.ledger import AttemptLedger

_STORE_PAUSE_S: Final = 0.1
_OTHERS_PAUSE_S: Final = 0.05


class CaptureSettlement:
    """Knows the ledger of this process, and the others' through the store's accounts."""

    def __init__(self, *, ledger: AttemptLedger, queue: CaptureQueue, accounts: CaptureAccounts) -> None:
        self._ledger = ledger
        self._queue = queue
        self._accounts = accounts

    async def settled(self, attempts: Sequence[str], totals: dict[str, pb.CaptureTotals]) -> None:
        """Waits until no live process has captures of the attempts; fills `totals`. The caller sets the deadline."""
        await asyncio.gather(self._settled_here(attempts), self._settled_elsewhere(attempts, totals))

    async def _settled_here(self, attempts: Sequence[str]) -> None:
        for attempt in attempts:
            if not self._ledger.is_settled(attempt):
                self._queue.flush_soon()
                await self._ledger.settled(attempt)

    async def _settled_elsewhere(self, attempts: Sequence[str], totals: dict[str, pb.CaptureTotals]) -> None:
        """Asks the store until no other process that lives has an open account; fills `totals`."""
        while attempts:
            try:
                found = await self._accounts.totals(attempts)
            except FulmenError:
                await asyncio.sleep(_STORE_PAUSE_S)
                continue
            totals |= zip(attempts, found, strict=True)
            attempts = [attempt for attempt in attempts if totals[attempt].sum.open and not totals[attempt].lost]
            if attempts:
                await asyncio.sleep(_OTHERS_PAUSE_S)
