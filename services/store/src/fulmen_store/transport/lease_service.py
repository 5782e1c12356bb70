"""`LeaseService` over gRPC: the stream of assignments to runners, and its unary counterparts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Collection, Coroutine, Iterable, Sequence
from uuid import UUID

import grpc.aio
from google.protobuf.duration_pb2 import Duration

from fulmen.errors import ArgumentInvalid, Draining, FulmenError, SessionEnded
from fulmen.ids import parse_attempt_name, parse_runner_name, runner_name
from fulmen.store.v1 import lease_pb2, lease_service_pb2_grpc
from fulmen.store.v1 import lease_service_pb2 as pb
from fulmen_service_kit.rpc.message_sizes import ANSWER_BYTES, parts_of
from fulmen_service_kit.security.auth import current_caller, require_project
from fulmen_store.leases.attempt_checks import check_attempt
from fulmen_store.leases.attempt_ends import AttemptEnds
from fulmen_store.leases.codec import report_of, unreadable_report
from fulmen_store.leases.leases import CompletionStatus, Grant, SessionOwner
from fulmen_store.leases.progress import ProgressWriter
from fulmen_store.leases.sessions import Sessions
from fulmen_store.leases.table import AttemptCheckTable
from fulmen_store.malformed import malformed
from fulmen_store.projects.names import ProjectNames
from fulmen_store.runners.orders import RunnerOrders
from fulmen_store.scheduling.dispatcher import Dispatcher, released
from fulmen_store.scheduling.runner_streams import (
    MAX_CREDIT,
    Acknowledged,
    Acknowledgement,
    Assigned,
    CancelRequested,
    Drained,
    LeasesLost,
    Notice,
    RunnerDone,
    RunnerOrdered,
    RunnerStream,
    StreamClosed,
)
from fulmen_store.transport.access import project_limit, require_count, require_range
from fulmen_store.transport.assignments import Assignments
from fulmen_store.transport.wire.leases import (
    acks_of,
    attempts_of,
    check_result,
    checked_labels,
    names_of,
    order_message,
    packed_load,
)

__all__ = ["LeaseService"]

MAX_REPORTS = 1000
MAX_PROJECTS = 1000
MAX_WAIT_S = 60.0
ACKS_IN_FLIGHT = 64
# Each name of an attempt has at most 140 bytes, each acknowledgement 400.
MAX_ATTEMPT_NAMES = 10_000
ACKS_IN_MESSAGE = 4096
FIRST_MESSAGE_LIMIT_S = 30.0


class LeaseService(lease_service_pb2_grpc.LeaseServiceServicer):
    """Serves leases."""

    def __init__(
        self,
        *,
        sessions: Sessions,
        dispatcher: Dispatcher,
        ends: AttemptEnds,
        projects: ProjectNames,
        checks: AttemptCheckTable,
        progress: ProgressWriter,
        assignments: Assignments,
        orders: RunnerOrders,
        drain_notice_s: float,
        stopping: asyncio.Event,
    ) -> None:
        """Creates the servicer.

        Args:
            sessions: Runner sessions and their streams.
            dispatcher: Receives the credit of runners.
            ends: Ends attempts as reported.
            projects: Names and numbers of projects.
            checks: Table for attempt checks.
            progress: Takes what agents report of their progress.
            assignments: Packs assignments.
            orders: Orders to runners.
            drain_notice_s: Time between the drain notice and the end of a stream, seconds.
            stopping: Set when the replica shuts down.
        """
        self._sessions = sessions
        self._dispatcher = dispatcher
        self._ends = ends
        self._project_names = projects
        self._checks = checks
        self._progress = progress
        self._assignments = assignments
        self._orders = orders
        self._drain_notice_s = drain_notice_s
        self._stopping = stopping

    async def StreamLeases(
        self, request_iterator: AsyncIterator[pb.StreamLeasesRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.StreamLeasesResponse]:
        """Streams assignments to a runner until it closes the stream."""
        self._require_service()
        first = await _first_message(request_iterator)
        stream, lost = await self._open(first.open)
        if self._stopping.is_set():
            # The shutdown began while the session was being opened, after all other streams were notified.
            stream.send(Drained())
        reader = asyncio.create_task(self._read(stream, request_iterator), name=f"lease-stream-{stream.session_id}")
        try:
            yield pb.StreamLeasesResponse(
                opened=pb.SessionOpened(
                    runner=runner_name(stream.session_id), lease_ttl=self._ttl(), lost_attempts=lost
                )
            )
            async for message in self._write(stream):
                yield message
        finally:
            reader.cancel()
            self._sessions.detach(stream)

    async def AcquireLeases(
        self, request: pb.AcquireLeasesRequest, context: grpc.aio.ServicerContext
    ) -> pb.AcquireLeasesResponse:
        """Acquires leases; waits for the first one."""
        self._require_service()
        wait_s = request.wait.seconds + request.wait.nanos / 1e9
        require_range("max_count", request.max_count, 1, MAX_REPORTS)
        require_range("wait", wait_s, 0, MAX_WAIT_S)
        owner = _owner()
        labels = checked_labels(request.info)
        projects = await self._projects(())
        if request.runner:
            session_id = _session_id(request.runner)
            await self._sessions.renew(session_id, owner=owner)
        else:
            session_id = await self._sessions.open(
                owner=owner, host=request.info.host, info=request.info.SerializeToString()
            )
        stream = self._sessions.attach(session_id, labels=labels, projects=projects, room_bytes=ANSWER_BYTES)
        stream.takes_orders = False
        self._dispatcher.add_credit(stream, request.max_count)
        assignments: list[lease_pb2.Assignment] = []
        unreadable: list[Grant] = []
        try:
            async with asyncio.timeout(max(wait_s, 0.001)):
                await stream.outbox.wait()
        except TimeoutError:
            pass
        else:
            while (notice := stream.outbox.take()) is not None:
                if isinstance(notice, Assigned):
                    messages = self._assignments.packed(notice.grants, unreadable)
                    assignments += (one for message in messages for one in message.assign.assignments)
        finally:
            self._sessions.detach(stream)
        await self._assignments.record_bounds()
        await self._fail(unreadable)
        return pb.AcquireLeasesResponse(assignments=assignments, runner=runner_name(session_id), lease_ttl=self._ttl())

    def _require_service(self) -> None:
        """Refuses new streams during a shutdown, which would otherwise wait for them.

        Raises:
            Draining: If the replica is shutting down.
        """
        if self._stopping.is_set():
            raise Draining("The store is shutting down: connect to another replica, or retry.")

    async def RenewLeases(
        self, request: pb.RenewLeasesRequest, context: grpc.aio.ServicerContext
    ) -> pb.RenewLeasesResponse:
        """Renews a session; returns its attempts and which of them were cancelled."""
        session_id = _session_id(request.runner)
        await self._sessions.renew(session_id, owner=_owner())
        if request.HasField("load"):
            self._sessions.record_load(session_id, packed_load(request.load))
        held = await self._sessions.held(session_id)
        cancelled = [lease.attempt for lease in held if lease.cancel_requested]
        return pb.RenewLeasesResponse(
            lease_ttl=self._ttl(),
            cancelled_attempts=names_of(cancelled[:MAX_ATTEMPT_NAMES], self._project_names),
            held_attempts=names_of((lease.attempt for lease in held[:MAX_ATTEMPT_NAMES]), self._project_names),
        )

    async def CompleteAttempts(
        self, request: pb.CompleteAttemptsRequest, context: grpc.aio.ServicerContext
    ) -> pb.CompleteAttemptsResponse:
        """Records the ends of attempts."""
        return pb.CompleteAttemptsResponse(acks=acks_of(await self._complete(request.results)))

    async def ReleaseLeases(
        self, request: pb.ReleaseLeasesRequest, context: grpc.aio.ServicerContext
    ) -> pb.ReleaseLeasesResponse:
        """Releases leases."""
        session_id = _session_id(request.runner)
        await self._sessions.renew(session_id, owner=_owner())
        attempts = await attempts_of(request.attempts, self._project_names, field="attempts")
        count = await self._sessions.release(session_id, attempts=frozenset(attempts) if attempts else None)
        return pb.ReleaseLeasesResponse(released_count=count)

    async def CheckAttempts(
        self, request: pb.CheckAttemptsRequest, context: grpc.aio.ServicerContext
    ) -> pb.CheckAttemptsResponse:
        """Returns the status of attempts."""
        require_count(request.attempts, field="attempts", maximum=MAX_REPORTS)
        names = [parse_attempt_name(one.attempt, field="attempts[].attempt") for one in request.attempts]
        found = await self._checks.read([(name.rollout_id, name.number) for name in names])
        may_know = current_caller().may_access
        known = [
            one if one is not None and one.project == name.project and may_know(one.project) else None
            for one, name in zip(found, names, strict=True)
        ]
        results = (
            check_result(asked.attempt, check_attempt(one, number=name.number, epoch=asked.epoch))
            for asked, name, one in zip(request.attempts, names, known, strict=True)
        )
        return pb.CheckAttemptsResponse(results=results)

    async def _open(self, request: pb.OpenSession) -> tuple[RunnerStream, Sequence[str]]:
        owner = _owner()
        labels = checked_labels(request.info)
        projects = await self._projects(request.projects)
        require_range("open.running_attempts", len(request.running_attempts), 0, MAX_ATTEMPT_NAMES)
        names = sorted(set(request.running_attempts))
        running = await attempts_of(names, self._project_names, field="open.running_attempts")
        if request.runner:
            resumed = await self._sessions.resume(
                _session_id(request.runner), owner=owner, labels=labels, projects=projects, running=frozenset(running)
            )
            return resumed.stream, [name for name, one in zip(names, running, strict=True) if one in resumed.lost]
        session_id = await self._sessions.open(
            owner=owner, host=request.info.host, info=request.info.SerializeToString()
        )
        return self._sessions.attach(session_id, labels=labels, projects=projects), names

    async def _projects(self, names: Sequence[str]) -> frozenset[int] | None:
        """Returns the projects that a runner serves; None for all."""
        require_range("projects", len(names), 0, MAX_PROJECTS)
        limit = project_limit()
        wanted = [require_project(name) for name in names] or ([] if limit is None else [limit])
        return frozenset([await self._project_names.require(name) for name in wanted]) or None

    async def _read(self, stream: RunnerStream, messages: AsyncIterator[pb.StreamLeasesRequest]) -> None:
        """Handles the runner's messages until it closes its side, then puts `RunnerDone` into the outbox."""
        slots = asyncio.Semaphore(ACKS_IN_FLIGHT)
        error: FulmenError | None = None
        try:
            async with asyncio.TaskGroup() as reports:
                async for message in messages:
                    self._sessions.record_activity(stream.session_id)
                    work = self._act(stream, message)
                    if work is not None:
                        await slots.acquire()
                        reports.create_task(_answer(stream, slots, work))
        except* FulmenError as group:
            error = _first(group)
        stream.send(RunnerDone(error=error))

    def _act(
        self, stream: RunnerStream, message: pb.StreamLeasesRequest
    ) -> Coroutine[None, None, list[Acknowledgement]] | None:
        match message.WhichOneof("message"):
            case "add_credits":
                count = message.add_credits.credit_count
                require_range("add_credits.credit_count", count, 1, MAX_CREDIT - stream.credit)
                self._dispatcher.add_credit(stream, count)
            case "complete":
                count = message.complete.credit_count
                if count:
                    require_range("complete.credit_count", count, 1, MAX_CREDIT - stream.credit)
                    self._dispatcher.add_credit(stream, count)
                return self._complete(message.complete.results, own=stream.session_id)
            case "release":
                return self._release(stream.session_id, message.release.attempts)
            case "renew":
                if message.renew.progress:
                    self._progress.report(stream.session_id, message.renew.progress)
                load = packed_load(message.renew.load) if message.renew.HasField("load") else None
                if message.renew.done_order > 0:
                    return self._confirm(stream.session_id, message.renew.done_order, load)
                if load is not None:
                    self._sessions.record_load(stream.session_id, load)
            case _:
                raise malformed("message", "must be set; `open` may be sent only once")
        return None

    async def _write(self, stream: RunnerStream) -> AsyncIterator[pb.StreamLeasesResponse]:
        closes_at: float | None = None
        while True:
            notice = stream.outbox.take()
            match notice:
                case None:
                    self._dispatcher.make_room(stream)
                    await _wait_until(stream, closes_at)
                    continue
                case RunnerDone():
                    if notice.error is not None:
                        raise notice.error
                    return
                case StreamClosed():
                    raise SessionEnded(
                        "The runner session has ended, or its stream was opened again.",
                        runner=runner_name(stream.session_id),
                    )
                case Drained():
                    stream.credit = 0
                    closes_at = asyncio.get_running_loop().time() + self._drain_notice_s
            unreadable: list[Grant] = []
            for message in self._encode(notice, unreadable):
                yield message
            await self._assignments.record_bounds()
            if unreadable:
                await self._fail(unreadable)
                self._dispatcher.add_credit(stream, len(unreadable))

    def _encode(self, notice: Notice, unreadable: list[Grant]) -> Iterable[pb.StreamLeasesResponse]:
        match notice:
            case Assigned():
                yield from self._assignments.packed(notice.grants, unreadable)
            case Acknowledged():
                for answers in parts_of(notice.answers, ACKS_IN_MESSAGE):
                    yield pb.StreamLeasesResponse(ack=pb.AcknowledgedAttempts(acks=acks_of(answers)))
            case CancelRequested():
                for attempts in parts_of(notice.attempts, MAX_ATTEMPT_NAMES):
                    names = names_of(attempts, self._project_names)
                    yield pb.StreamLeasesResponse(cancel=pb.CancelledAttempts(attempts=names))
            case LeasesLost():
                for attempts in parts_of(notice.attempts, MAX_ATTEMPT_NAMES):
                    names = names_of(attempts, self._project_names)
                    yield pb.StreamLeasesResponse(lease_lost=pb.LostLeases(attempts=names))
            case RunnerOrdered():
                yield pb.StreamLeasesResponse(order=order_message(notice))
            case Drained():
                grace = Duration()
                grace.FromNanoseconds(round(self._drain_notice_s * 1e9))
                yield pb.StreamLeasesResponse(drain=pb.DrainNotice(grace=grace))
            case RunnerDone() | StreamClosed():
                return

    async def _complete(
        self, results: Sequence[lease_pb2.AttemptResult], *, own: UUID | None = None
    ) -> list[Acknowledgement]:
        require_count(results, field="results", maximum=MAX_REPORTS)
        names = [parse_attempt_name(result.attempt, field="results[].attempt") for result in results]
        numbers = await self._project_names.find_all(name.project for name in names)
        reports = [
            report_of(result, name, project_id=numbers[name.project])
            for result, name in zip(results, names, strict=True)
        ]
        good = [report for report in reports if not isinstance(report, str)]
        foreign = await self._foreign({report.session_id for report in good} - {own})
        ended = iter(await self._ends.report([report for report in good if report.session_id not in foreign]))
        statuses = iter(
            [CompletionStatus.LEASE_LOST if report.session_id in foreign else next(ended) for report in good]
        )
        return [
            Acknowledgement(attempt=result.attempt, status=CompletionStatus.INVALID, message=report)
            if isinstance(report, str)
            else Acknowledgement(attempt=result.attempt, status=next(statuses))
            for result, report in zip(results, reports, strict=True)
        ]

    async def _foreign(self, session_ids: Collection[UUID]) -> frozenset[UUID]:
        """Returns the sessions whose leases the caller may not access."""
        limit = project_limit()
        return frozenset() if limit is None else await self._sessions.foreign(session_ids, project=limit)

    async def _release(self, session_id: UUID, names: Sequence[str]) -> list[Acknowledgement]:
        require_count(names, field="release.attempts", maximum=MAX_REPORTS)
        attempts = await attempts_of(names, self._project_names, field="release.attempts")
        statuses = await self._ends.report([released(attempt, session_id) for attempt in attempts])
        return [Acknowledgement(attempt=name, status=status) for name, status in zip(names, statuses, strict=True)]

    async def _confirm(self, session_id: UUID, number: int, load: bytes | None) -> list[Acknowledgement]:
        await self._orders.confirm(session_id, number, load=load)
        return []

    async def _fail(self, grants: Sequence[Grant]) -> None:
        """Ends attempts that cannot be sent to the runner, because their stored requests are unreadable."""
        reports = [unreadable_report(grant) for grant in grants]
        for start in range(0, len(reports), MAX_REPORTS):
            await self._ends.report(reports[start : start + MAX_REPORTS])

    def _ttl(self) -> Duration:
        ttl = Duration()
        ttl.FromNanoseconds(round(self._sessions.lease_ttl_s * 1e9))
        return ttl


async def _first_message(messages: AsyncIterator[pb.StreamLeasesRequest]) -> pb.StreamLeasesRequest:
    try:
        async with asyncio.timeout(FIRST_MESSAGE_LIMIT_S):
            async for message in messages:
                if message.WhichOneof("message") == "open":
                    return message
                break
    except TimeoutError:
        raise malformed("open", "was not received in time") from None
    raise malformed("open", "must be the first message")


async def _answer(stream: RunnerStream, slots: asyncio.Semaphore, work: Awaitable[list[Acknowledgement]]) -> None:
    try:
        if answers := await work:
            stream.send(Acknowledged(answers=answers))
    finally:
        slots.release()


async def _wait_until(stream: RunnerStream, closes_at: float | None) -> None:
    if closes_at is None:
        # Bounded by the runner's stream, which ends with the session.
        await stream.outbox.wait()
        return
    try:
        async with asyncio.timeout_at(closes_at):
            await stream.outbox.wait()
    except TimeoutError:
        raise Draining("The store is shutting down: open the stream again elsewhere.") from None


def _owner() -> SessionOwner:
    caller = current_caller()
    return SessionOwner(subject=caller.subject, project=caller.project)


def _session_id(name: str) -> UUID:
    try:
        return parse_runner_name(name)
    except ArgumentInvalid:
        raise SessionEnded("The runner session is unknown: open a new one.", runner=name[:64]) from None


def _first(group: BaseExceptionGroup[FulmenError]) -> FulmenError:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, FulmenError)
    return error
