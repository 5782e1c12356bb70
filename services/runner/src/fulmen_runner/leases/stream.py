"""The lease stream to the store.

Invariant: there is one stream at a time, with one writer. A broken stream is reopened with the same session, so that
leases survive, and pending reports are resent. Only errors that a retry cannot fix end the role.
"""

import asyncio
import random
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import grpc.aio
import structlog

from fulmen.errors import ArgumentInvalid, FulmenError, PermissionDenied, SessionEnded, TokenInvalid, Unimplemented
from fulmen.rpc.channel import DuplexStream, FulmenChannel
from fulmen.store.v1 import lease_pb2, lease_service_pb2_grpc
from fulmen.store.v1 import lease_service_pb2 as messages
from fulmen_runner.attempts.pool import AttemptPool, StopReason
from fulmen_runner.attempts.progress import ProgressBoard
from fulmen_runner.leases.codec import read_assignment, read_status, write_load, write_progress, write_result
from fulmen_runner.leases.orders import Orders
from fulmen_runner.slots.keeper import SlotKeeper

OPEN_TIMEOUT_S = 15.0
RELEASE_TIMEOUT_S = 2.0
COALESCE_S = 0.003
"""How long the writer collects reports for one message."""

ACK_TIMEOUT_S = 15.0
"""A report without an answer for this long is resent on the same stream."""

BACKOFF_MIN_S = 0.1
BACKOFF_MAX_S = 5.0
RENEWALS_PER_TTL = 3

_FATAL = (TokenInvalid, PermissionDenied, ArgumentInvalid, Unimplemented)

Stream = DuplexStream[messages.StreamLeasesRequest, messages.StreamLeasesResponse]

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerIdentity:
    """How the runner identifies itself to the store."""

    host: str
    version: str
    labels: dict[str, str]
    projects: tuple[str, ...] = ()
    address: Callable[[], str] = str
    """Returns the address of the runner's rpcs, `host:port`; known once it listens."""


class StreamClosed(Exception):
    """The store closed the stream or requested a new one."""


class LeaseStream:
    """Background role: exchanges assignments, reports and renewals with the store."""

    def __init__(
        self,
        *,
        channel: FulmenChannel,
        pool: AttemptPool,
        identity: RunnerIdentity,
        keeper: SlotKeeper,
        progress: ProgressBoard,
        orders: Callable[[], Orders],
    ) -> None:
        """Initializes the role.

        Args:
            channel: Channel to the store.
            pool: Runs the assigned attempts.
            identity: How the runner identifies itself.
            keeper: Has the load to report.
            progress: Has the attempts' progress to report.
            orders: Returns what carries out orders; not called before a stream is open.
        """
        self._stub = lease_service_pb2_grpc.LeaseServiceStub(channel)
        self._pool = pool
        self._session = pool.session
        self._identity = identity
        self._keeper = keeper
        self._progress = progress
        self._orders = orders
        progress.changed = pool.changed.set
        self._ttl_s = 0.0
        self._was_opened = False
        self._sent_slots = 0
        self.is_open = False
        """Whether a session is open on the stream."""

    async def run(self) -> None:
        """Keeps a stream open until cancelled.

        Raises:
            FulmenError: If the store rejects the runner permanently: its token, its role or its messages.
        """
        failures = 0
        while True:
            try:
                await self._one_stream()
            except SessionEnded:
                _log.warning("session_ended", runner=self._session.runner)
                self._pool.stop(self._session.ended(), StopReason.LEASE_LOST)
                await asyncio.sleep(BACKOFF_MIN_S)
            except _FATAL as error:
                _log.error("store_refused_runner", error=str(error), reason=error.reason)
                raise
            except (FulmenError, StreamClosed, TimeoutError, asyncio.InvalidStateError) as error:
                failures = 0 if self._was_opened else failures + 1
                wait_s = random.uniform(0.5, 1.0) * min(BACKOFF_MAX_S, BACKOFF_MIN_S * 2**failures)
                _log.warning(
                    "lease_stream_broken", error=str(error) or type(error).__name__, retry_in_s=round(wait_s, 2),
                    running=len(self._session.running), unacknowledged=self._session.unacknowledged_count,
                )  # fmt: skip
                await asyncio.sleep(wait_s)

    @property
    def runner(self) -> str:
        """Name of the session, `runners/{uuid}`; empty if there is none."""
        return self._session.runner

    @property
    def ttl_s(self) -> float:
        """TTL of the session without a renewal, in seconds; 0 before the first session."""
        return self._ttl_s

    async def release_session(self) -> None:
        """Releases all leases and ends the session, at the end of a drain. A failure is harmless: leases expire."""
        runner = self._session.runner
        if not runner:
            return
        request = messages.ReleaseLeasesRequest(runner=runner)
        try:
            await self._stub.ReleaseLeases(request, timeout=RELEASE_TIMEOUT_S)
        except FulmenError as error:
            _log.warning("session_not_released", error=str(error))

    async def _one_stream(self) -> None:
        self._was_opened = False
        stream: Stream = self._stub.StreamLeases()
        try:
            # In a task of its own: grpc raises CancelledError in the reader of a call that the server cancelled.
            await _first_of(self._open(stream))
            self._was_opened = self.is_open = True
            await _first_of(self._read(stream), self._write(stream))
        finally:
            self.is_open = False
            stream.cancel()

    async def _open(self, stream: Stream) -> None:
        info = lease_pb2.RunnerInfo(
            host=self._identity.host,
            version=self._identity.version,
            labels=self._identity.labels,
            slot_count=self._session.slots,
            address=self._identity.address(),
        )
        opening = messages.OpenSession(
            runner=self._session.runner,
            info=info,
            running_attempts=self._session.held_attempts(),
            projects=self._identity.projects,
        )
        async with asyncio.timeout(OPEN_TIMEOUT_S):
            await stream.write(messages.StreamLeasesRequest(open=opening))
            answer = await stream.read()
        if answer is grpc.aio.EOF or answer.WhichOneof("message") != "opened":
            raise StreamClosed("store closed the stream before opening the session")
        opened = answer.opened
        resumed = opened.runner == self._session.runner
        self._session.opened(opened.runner)
        self._ttl_s = opened.lease_ttl.seconds + opened.lease_ttl.nanos / 1e9
        self._pool.stop(opened.lost_attempts, StopReason.LEASE_LOST)
        self._pool.changed.set()
        self._progress.retake()
        _log.info(
            "session_opened", runner=opened.runner, resumed=resumed, lease_ttl_s=self._ttl_s,
            lost=len(opened.lost_attempts),
        )  # fmt: skip

    async def _read(self, stream: Stream) -> None:
        while True:
            message = await stream.read()
            if message is grpc.aio.EOF:
                raise StreamClosed("store closed the stream")
            match message.WhichOneof("message"):
                case "assign":
                    self._pool.start([read_assignment(assignment) for assignment in message.assign.assignments])
                case "ack":
                    self._acknowledge(message.ack.acks)
                case "cancel":
                    self._pool.stop(message.cancel.attempts, StopReason.CANCELLED)
                case "lease_lost":
                    _log.warning("leases_lost", count=len(message.lease_lost.attempts))
                    self._pool.stop(message.lease_lost.attempts, StopReason.LEASE_LOST)
                case "order":
                    self._orders().carry_out(message.order)
                case "drain":
                    raise StreamClosed("store is draining")
                case _:
                    continue

    def _acknowledge(self, acks: Any) -> None:
        for ack in acks:
            status = read_status(ack)
            if status is None:
                _log.warning("ack_not_understood", attempt=ack.attempt, status=ack.status)
                continue
            if status.value not in ("APPLIED", "DUPLICATE"):
                _log.warning("report_not_applied", attempt=ack.attempt, status=status.value, reason=ack.message)
            self._session.acknowledged(ack.attempt, status, ack.message)
        self._pool.acknowledged.set()
        self._pool.changed.set()

    async def _write(self, stream: Stream) -> None:
        renew_every_s = self._ttl_s / RENEWALS_PER_TTL
        last_s = time.monotonic()
        while True:
            try:
                async with asyncio.timeout(max(0.01, last_s + renew_every_s - time.monotonic())):
                    await self._pool.changed.wait()
            except TimeoutError:
                pass
            else:
                await asyncio.sleep(COALESCE_S)
            self._pool.changed.clear()
            self._session.resend(sent_before_s=time.monotonic() - ACK_TIMEOUT_S)
            await self._send_pending(stream)
            # Other messages renew the session as well, but only this one carries the load and the attempts' progress. Changed
            # slots, new progress and orders that were carried out are sent immediately.
            changed = self._sent_slots != self._session.slots
            is_news = changed or self._progress.has_news or self._orders().has_news
            if is_news or time.monotonic() >= last_s + renew_every_s:
                await self._renew(stream)
                last_s = time.monotonic()

    async def _renew(self, stream: Stream) -> None:
        load = self._keeper.load()
        self._sent_slots = self._session.slots
        renewal = messages.RenewSession(
            load=None if load is None else write_load(load),
            progress=write_progress(self._progress.take()),
            done_order=self._orders().take_done(),
        )
        await stream.write(messages.StreamLeasesRequest(renew=renewal))

    async def _send_pending(self, stream: Stream) -> None:
        """Sends pending reports, then credits."""
        while reports := self._session.drain_reports(now_s=time.monotonic()):
            results = [write_result(report) for report in reports if report.outcome is not None]
            released = [report.assignment.attempt for report in reports if report.outcome is None]
            if results:
                complete = messages.CompletedAttempts(results=results)
                await stream.write(messages.StreamLeasesRequest(complete=complete))
            if released:
                release = messages.ReleasedAttempts(attempts=released)
                await stream.write(messages.StreamLeasesRequest(release=release))
        credit_count = self._session.grant_credits(straggler_count=len(self._pool.stragglers))
        if credit_count:
            await stream.write(messages.StreamLeasesRequest(add_credits=messages.AddCredits(credit_count=credit_count)))


async def _first_of(*coroutines: Coroutine[Any, Any, None]) -> None:
    """Runs coroutines until one ends, cancels the others, and re-raises its exception.

    Raises:
        StreamClosed: If grpc cancelled it.
    """
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        if task.cancelled():
            raise StreamClosed("store cancelled the stream")
        task.result()
