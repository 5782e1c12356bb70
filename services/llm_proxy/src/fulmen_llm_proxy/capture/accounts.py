"""Reports to the store which attempts may have captures in this process.

The store has an open account of an attempt before its agent has the answer of a call, and a settled one after the captures
of its calls. So it knows, for every attempt and at any time, which processes still have to deliver something; and which
attempts have lost captures when a process was killed: those whose accounts are open.

A call waits for its account to open while its backend answers, so that it seldom waits longer. While the store is
unavailable, accounts cannot be opened: one process of several then keeps its answers back. A process that is the only one
answers nevertheless, and has told the store so: it counts as if all attempts of its time had open accounts.

Invariant: an answer is given to an attempt only if the store has its open account, or has recorded that this process serves
alone and the attempt was leased until shortly after the store was last reached. One event loop owns the accounts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import islice
from typing import Final

import structlog

from fulmen.errors import FulmenError, Unavailable
from fulmen.rpc.channel import FulmenChannel
from fulmen.store.v1 import proxy_service_pb2 as pb
from fulmen.store.v1 import proxy_service_pb2_grpc
from fulmen_llm_proxy.capture.ledger import AttemptLedger, Summary

RENEWAL_S: Final = 2.0
"""Interval of calls that renew the membership of this process, seconds; the store counts it as lost after 10 s."""
HOLD_S: Final = 30.0
"""Time for which an answer is kept back, seconds; then the call fails, and may be made again."""
CALL_TIMEOUT_S: Final = 5.0
LEAVE_S: Final = 5.0
MAX_ACCOUNTS: Final = 1000
"""The store's limit per request."""
ALONE_S: Final = 10.0
"""Time after the last contact with the store until which the attempts were leased that a lone process answers, seconds. Later ones
show that others reach the store. The store adds two seconds for clocks."""
_COLLECT_S: Final = 0.002
_SETTLED_S: Final = 0.1
"""Time after which a settled account is reported, seconds, so that one that calls without a pause stays open."""
_RETRY_S: Final = 0.2

_log = structlog.get_logger(__name__)


class CaptureAccounts:
    """Background role: keeps the store informed."""

    def __init__(self, *, channel: FulmenChannel, instance_id: str, ledger: AttemptLedger) -> None:
        """Follows the ledger.

        Args:
            channel: the store's.
            instance_id: unique id of this process, never reused.
        """
        self._stub = proxy_service_pb2_grpc.ProxyServiceStub(channel)
        self._instance_id = instance_id
        self._ledger = ledger
        self._open: set[str] = set()
        """Accounts that the store knows to be open."""
        self._opening: dict[str, asyncio.Event] = {}
        self._settled: dict[str, None] = {}
        self._wake = asyncio.Event()
        self._wake.set()
        self._lock = asyncio.Lock()
        self._timer: asyncio.TimerHandle | None = None
        self._alone = False
        """Whether no other process lived when the store last answered."""
        self._serves_alone = False
        self._contact_s = 0.0
        self._store_unavailable = False
        ledger.follow(self)

    @property
    def is_alone(self) -> bool:
        """Whether no other process lived when the store last answered."""
        return self._alone

    @property
    def serves_alone(self) -> bool:
        """Whether the store has recorded that this process serves alone: it answers while the store is unavailable."""
        return self._serves_alone

    def began(self, attempt: str) -> None:
        """Notes that a call of an attempt begins."""
        self._settled.pop(attempt, None)
        if attempt not in self._open and attempt not in self._opening:
            self._opening[attempt] = asyncio.Event()
            self._wake.set()

    def settled(self, attempt: str) -> None:
        """Notes that the store has all captures of an attempt."""
        self._settled[attempt] = None
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_SETTLED_S, self._report_settled)

    async def opened(self, attempt: str, *, leased_s: float) -> None:
        """Waits until an attempt may be answered.

        Args:
            leased_s: when its key was made, by the store's clock, Unix seconds.

        Raises:
            Unavailable: if the store is unavailable for long; retryable.
        """
        opening = self._opening.get(attempt)
        if opening is None or (self._serves_alone and leased_s <= self._contact_s + ALONE_S):
            return
        try:
            async with asyncio.timeout(HOLD_S):
                await opening.wait()
        except TimeoutError:
            raise Unavailable("The store is unavailable, and other proxies may serve the attempt.") from None

    async def run(self) -> None:
        """Keeps the store informed until cancelled."""
        while True:
            try:
                async with asyncio.timeout(RENEWAL_S):
                    await self._wake.wait()
            except TimeoutError:
                pass
            await asyncio.sleep(_COLLECT_S)
            try:
                await self.sync()
            except FulmenError as error:
                if not self._store_unavailable:
                    _log.warning("proxy_sync_failed", reason=error.reason)
                self._store_unavailable = True
                await asyncio.sleep(_RETRY_S)
            else:
                self._store_unavailable = False

    async def leave(self) -> None:
        """Reports to the store that no captures of this process are missing.

        Gives up after `LEAVE_S`, if the store does not answer or captures are on the disk alone: their attempts count as lost then.
        """
        try:
            async with asyncio.timeout(LEAVE_S):
                await self._leave()
        except TimeoutError:
            _log.warning("accounts_left_open", attempts=len({*self._open, *self._opening, *self._settled}))

    async def _leave(self) -> None:
        for attempt in {*self._open, *self._opening}:
            await self._ledger.settled(attempt)
        while True:
            try:
                await self.sync()
                if self._open or self._opening or self._settled:
                    continue
                await self._call(pb.SyncProxyRequest(instance_id=self._instance_id, leaving=True))
            except FulmenError:
                await asyncio.sleep(_RETRY_S)
            else:
                return

    async def totals(self, attempts: Sequence[str]) -> Sequence[pb.CaptureTotals]:
        """Returns what the other processes have of attempts, in order.

        Raises:
            FulmenError: if the store does not answer.
        """
        request = pb.GetCaptureTotalsRequest(attempts=attempts, except_instance_id=self._instance_id)
        answer = await self._stub.GetCaptureTotals(request, timeout=CALL_TIMEOUT_S)
        return answer.totals

    async def sync(self) -> None:
        """Reports what has changed, at most `MAX_ACCOUNTS` accounts.

        Raises:
            FulmenError: if the store did not answer; the next call repeats it.
        """
        async with self._lock:
            self._wake.clear()
            opening = list(islice(self._opening, MAX_ACCOUNTS))
            settled = [one for one in islice(self._settled, MAX_ACCOUNTS - len(opening)) if one not in self._opening]
            for attempt in settled:
                # One that begins again from here on is opened again.
                del self._settled[attempt]
                self._open.discard(attempt)
            serves_alone = self._alone
            request = pb.SyncProxyRequest(
                instance_id=self._instance_id,
                accounts=[
                    *(_account(self._ledger.summary(each), is_open=True) for each in opening),
                    *(_account(self._ledger.summary(each), is_open=False) for each in settled),
                ],
                serves_alone=serves_alone,
            )
            try:
                await self._call(request)
            except FulmenError:
                for attempt in settled:
                    if attempt not in self._opening:
                        self._settled[attempt] = None
                raise
            self._serves_alone = serves_alone and self._alone
            for attempt in opening:
                self._open.add(attempt)
                self._opening.pop(attempt).set()
            if self._opening or self._alone is not serves_alone:
                self._wake.set()
            if self._settled and self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(_SETTLED_S, self._report_settled)

    async def _call(self, request: pb.SyncProxyRequest) -> None:
        answer = await self._stub.SyncProxy(request, timeout=CALL_TIMEOUT_S)
        self._contact_s = answer.store_time.ToNanoseconds() / 1e9
        self._alone = answer.other_count == 0
        # From here on another process may end attempts that this one serves.
        self._serves_alone = self._serves_alone and self._alone

    def _report_settled(self) -> None:
        self._timer = None
        self._wake.set()


def _account(summary: Summary, *, is_open: bool) -> pb.CaptureAccount:
    return pb.CaptureAccount(
        attempt=summary.attempt,
        open=is_open,
        call_count=summary.calls,
        infra_failure_count=summary.infra_failures,
        unusable_count=summary.unusable,
        prompt_token_count=summary.prompt_tokens,
        completion_token_count=summary.completion_tokens,
        throttled_count=summary.throttled,
    )
