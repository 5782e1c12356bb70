"""A second implementation of the part of the store that runners use, in memory, over real gRPC.

It keeps the contract of LeaseService: sessions with a TTL, demand credits, fencing, acknowledgements after the "commit",
resumption with the attempts that still run, retry of INFRA, LEASE_LOST and RELEASED. What is accepted survives
`restart`, as it would in a database.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
from google.protobuf.duration_pb2 import Duration
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from fulmen.errors import DatabaseUnavailable, ResourceNotFound, SessionEnded
from fulmen.ids import (
    DEFAULT_PROJECT,
    attempt_of,
    parse_attempt_name,
    rollout_name,
    runner_name,
    uuid7,
)
from fulmen.store.v1 import (
    attempt_pb2,
    failure_pb2,
    lease_pb2,
    lease_service_pb2_grpc,
    project_service_pb2,
    project_service_pb2_grpc,
    resource_pb2,
    resource_service_pb2,
    resource_service_pb2_grpc,
    rollout_pb2,
)
from fulmen.store.v1 import (
    lease_service_pb2 as messages,
)
from fulmen_service_kit.rpc.edge import RpcEdge
from fulmen_service_kit.security.auth import Authenticator, current_caller
from fulmen_service_kit.security.introspection import introspected
from fulmen_service_kit.security.tokens import TokenSigner, TokenVerifier
from tests.support.runner.harness import SIGNING_KEY
from tests.support.runner.stores import LEASE_TTL_S, Ended, ended_of

RETRIED = (failure_pb2.FAILURE_KIND_INFRA, failure_pb2.FAILURE_KIND_LEASE_LOST, failure_pb2.FAILURE_KIND_RELEASED)
FREE_OF_CHARGE = failure_pb2.FAILURE_KIND_RELEASED
DEFAULT_TIMEOUT_S = 60


@dataclass
class Attempted:
    """One attempt as it ended."""

    attempt: str
    failure_kind: int
    result: lease_pb2.AttemptResult | None


@dataclass
class Entry:
    """A rollout and what became of it."""

    rollout: rollout_pb2.Rollout
    ended: list[Attempted] = field(default_factory=list)
    final: bool = False
    granted_count: int = 0


@dataclass
class Session:
    """A runner session; `outgoing` is its open stream."""

    session_id: str
    held: dict[str, lease_pb2.Assignment] = field(default_factory=dict)
    credits: int = 0
    outgoing: asyncio.Queue[messages.StreamLeasesResponse] | None = None
    expiry: asyncio.TimerHandle | None = None


class StoreDouble(
    lease_service_pb2_grpc.LeaseServiceServicer,
    project_service_pb2_grpc.ProjectServiceServicer,
    resource_service_pb2_grpc.ResourceServiceServicer,
    trace_service_pb2_grpc.TraceServiceServicer,
):
    """The double. Tests read `entries`, wait with `until`, and set the switches.

    Attributes:
        swallow_acks: While true, results are recorded and the acknowledgement is lost.
        labels: Of the runner that opened a stream last.
        refuse_results: How many further results are answered INVALID.
        failing_reads: How many further reads of resources fail.
    """

    def __init__(self, *, lease_ttl_s: float = LEASE_TTL_S) -> None:
        self.entries: dict[str, Entry] = {}
        self.swallow_acks = False
        self.refuse_results = 0
        self.failing_reads = 0
        self.most_held = 0
        self.stream_count = 0
        self.message_count = 0
        self.renewal_count = 0
        self.progress: dict[str, list[attempt_pb2.AttemptProgress]] = {}
        self.loads: list[lease_pb2.RunnerLoad] = []
        self.labels: dict[str, str] = {}
        self.otlp_spans: list[Span] = []
        self._verifier = TokenVerifier(SIGNING_KEY)
        self._signer = TokenSigner(SIGNING_KEY)
        self._ttl_s = lease_ttl_s
        self._queue: deque[str] = deque()
        self._sessions: dict[str, Session] = {}
        self._resources: dict[str, list[resource_pb2.ResourceVersion]] = {}
        self._changed = asyncio.Condition()
        self._server: grpc.aio.Server | None = None
        self.port = 0
        self.target = ""

    # --- what tests do ---

    async def __aenter__(self) -> StoreDouble:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Serves on a free port, or on the same one as before."""
        edge = RpcEdge(Authenticator(verifier=self._verifier, dev_mode=False), write_timeout_s=300)
        self._server = grpc.aio.server(interceptors=[edge], options=(("grpc.so_reuseport", 0),))
        lease_service_pb2_grpc.add_LeaseServiceServicer_to_server(self, self._server)
        resource_service_pb2_grpc.add_ResourceServiceServicer_to_server(self, self._server)
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        project_service_pb2_grpc.add_ProjectServiceServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        self.target = f"127.0.0.1:{self.port}"
        await self._server.start()

    async def stop(self) -> None:
        """Stops serving at once; what was recorded stays."""
        if self._server is not None:
            await self._server.stop(grace=None)
            self._server = None
        for session in self._sessions.values():
            session.outgoing = None
            session.credits = 0

    async def close(self) -> None:
        """Stops for good."""
        await self.stop()
        for session in self._sessions.values():
            if session.expiry is not None:
                session.expiry.cancel()

    async def kill(self) -> None:
        """Dies without notice; what was accepted stays."""
        await self.stop()

    async def revive(self) -> None:
        """Serves again on the same port."""
        await self.start()

    async def publish(self, resource_id: str, content: bytes) -> str:
        """Adds a version of a resource; returns its name."""
        versions = self._resources.setdefault(resource_id, [])
        name = f"resources/{resource_id}/versions/{len(versions) + 1}"
        sha256 = hashlib.sha256(content).digest()
        versions.append(resource_pb2.ResourceVersion(name=name, content=content, sha256=sha256))
        return name

    async def create(self, rollouts: Iterable[rollout_pb2.Rollout]) -> list[str]:
        """Queues rollouts; returns their names."""
        created = []
        for rollout in rollouts:
            rollout.name = rollout.name or rollout_name(rollout.project or DEFAULT_PROJECT, uuid7())
            self.entries[rollout.name] = Entry(rollout=rollout)
            self._queue.append(rollout.name)
            created.append(rollout.name)
        self._dispatch()
        return created

    async def ended(self, names: list[str]) -> dict[str, list[Ended]]:
        """Waits until all are final; returns their attempts, oldest first."""
        await self.until(lambda: all(self.entries[name].final for name in names))
        attempts = {name: self.entries[name].ended for name in names}
        return {name: [ended_of(a.attempt, a.failure_kind, a.result) for a in attempts[name]] for name in names}

    async def cancel(self, names: list[str]) -> None:
        """Asks the holders of rollouts to stop them."""
        for name in names:
            for session in self._sessions.values():
                attempts = [attempt for attempt in session.held if attempt.startswith(f"{name}/")]
                if attempts and session.outgoing is not None:
                    cancelled = messages.CancelledAttempts(attempts=attempts)
                    session.outgoing.put_nowait(messages.StreamLeasesResponse(cancel=cancelled))

    def end_sessions(self) -> None:
        """Ends every session, as their TTL would, and notifies their streams."""
        for session in list(self._sessions.values()):
            if session.outgoing is not None:
                lost = messages.LostLeases(attempts=list(session.held))
                session.outgoing.put_nowait(messages.StreamLeasesResponse(lease_lost=lost))
            self._end(session)

    def forget_sessions(self) -> None:
        """Ends every session without telling; to be seen when they resume."""
        for session in list(self._sessions.values()):
            self._end(session)

    async def until(self, condition: Callable[[], bool], deadline_s: float = 60.0) -> None:
        """Waits until a condition of the double's state holds."""
        async with asyncio.timeout(deadline_s), self._changed:
            await self._changed.wait_for(condition)

    def held_attempts(self) -> list[str]:
        """Returns all attempts that run."""
        return [attempt for session in self._sessions.values() for attempt in session.held]

    def credit_count(self) -> int:
        """Returns how much work the runners have asked for and not got."""
        return sum(session.credits for session in self._sessions.values())

    # --- what runners do ---

    async def StreamLeases(self, request_iterator: Any, context: Any) -> AsyncIterator[messages.StreamLeasesResponse]:
        opening = (await anext(request_iterator)).open
        session = self._open(opening)
        outgoing: asyncio.Queue[messages.StreamLeasesResponse] = asyncio.Queue()
        session.outgoing, session.credits = outgoing, 0
        self.stream_count += 1
        self.labels = dict(opening.info.labels)
        named = set(opening.running_attempts)
        for attempt in [a for a in session.held if a not in named]:
            self._conclude(session, attempt, failure_pb2.FAILURE_KIND_RELEASED, None)
        opened = messages.SessionOpened(
            runner=runner_name(session.session_id),
            lease_ttl=_duration(self._ttl_s),
            lost_attempts=[attempt for attempt in named if attempt not in session.held],
        )
        yield messages.StreamLeasesResponse(opened=opened)
        await self._notify()
        reading = asyncio.create_task(self._read(session, outgoing, request_iterator))
        try:
            while True:
                sending = asyncio.ensure_future(outgoing.get())
                await asyncio.wait((sending, reading), return_when=asyncio.FIRST_COMPLETED)
                if not sending.done():
                    sending.cancel()
                    reading.result()
                    return
                yield sending.result()
        finally:
            reading.cancel()
            if session.outgoing is outgoing:
                session.outgoing, session.credits = None, 0

    async def RenewLeases(self, request: messages.RenewLeasesRequest, context: Any) -> messages.RenewLeasesResponse:
        session = self._sessions.get(request.runner)
        if session is None:
            raise SessionEnded("The session is over.")
        self._renew(session)
        self.renewal_count += 1
        await self._notify()
        return messages.RenewLeasesResponse(lease_ttl=_duration(self._ttl_s), held_attempts=list(session.held))

    async def ReleaseLeases(
        self, request: messages.ReleaseLeasesRequest, context: Any
    ) -> messages.ReleaseLeasesResponse:
        session = self._sessions.get(request.runner)
        if session is None:
            raise SessionEnded("The session is over.")
        attempts = list(request.attempts) or list(session.held)
        for attempt in attempts:
            self._conclude(session, attempt, failure_pb2.FAILURE_KIND_RELEASED, None)
        if not request.attempts:
            self._end(session)
        await self._notify()
        return messages.ReleaseLeasesResponse(released_count=len(attempts))

    async def GetResources(
        self, request: resource_service_pb2.GetResourcesRequest, context: Any
    ) -> resource_service_pb2.GetResourcesResponse:
        if self.failing_reads:
            self.failing_reads -= 1
            raise DatabaseUnavailable("The database is unavailable, by order of the test.")
        found = []
        for name in request.names:
            resource_id, _, number = name.removeprefix("resources/").partition("/versions/")
            versions = self._resources.get(resource_id, [])
            if not number or int(number) > len(versions):
                raise ResourceNotFound(f"There is no {name}.", resource=name)
            found.append(versions[int(number) - 1])
        return resource_service_pb2.GetResourcesResponse(resources=found)

    async def IntrospectToken(
        self, request: project_service_pb2.IntrospectTokenRequest, context: Any
    ) -> project_service_pb2.IntrospectTokenResponse:
        return introspected(self._verifier, request.token, asked_by=current_caller())

    async def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: Any
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                self.otlp_spans += scope.spans
        await self._notify()
        return trace_service_pb2.ExportTraceServiceResponse()

    # --- inside ---

    def _open(self, opening: messages.OpenSession) -> Session:
        if opening.runner:
            session = self._sessions.get(opening.runner)
            if session is None:
                raise SessionEnded("The session is unknown or over.")
        else:
            session = Session(session_id=str(uuid7()))
            self._sessions[runner_name(session.session_id)] = session
        self._renew(session)
        return session

    async def _read(self, session: Session, outgoing: asyncio.Queue[Any], requests: Any) -> None:
        async for request in requests:
            self.message_count += 1
            self._renew(session)
            match request.WhichOneof("message"):
                case "renew":
                    if request.renew.HasField("load"):
                        self.loads.append(request.renew.load)
                    for said in request.renew.progress:
                        self.progress.setdefault(said.attempt, []).append(said.progress)
                case "add_credits":
                    session.credits += request.add_credits.credit_count
                    self._dispatch()
                case "complete":
                    acks = [self._complete(session, result) for result in request.complete.results]
                    self._acknowledge(outgoing, acks)
                case "release":
                    acks = []
                    for attempt in request.release.attempts:
                        self._conclude(session, attempt, failure_pb2.FAILURE_KIND_RELEASED, None)
                        acks.append(_ack(attempt, lease_pb2.COMPLETION_STATUS_APPLIED))
                    self._acknowledge(outgoing, acks)
            await self._notify()

    def _acknowledge(self, outgoing: asyncio.Queue[Any], acks: list[lease_pb2.CompletionAck]) -> None:
        if not self.swallow_acks:
            outgoing.put_nowait(messages.StreamLeasesResponse(ack=messages.AcknowledgedAttempts(acks=acks)))

    def _complete(self, session: Session, result: lease_pb2.AttemptResult) -> lease_pb2.CompletionAck:
        if self.refuse_results:
            self.refuse_results -= 1
            return _ack(result.attempt, lease_pb2.COMPLETION_STATUS_INVALID, "refused by the test")
        rollout = parse_attempt_name(result.attempt).rollout
        for ended in self.entries[rollout].ended:
            if ended.attempt == result.attempt:
                same = ended.result is not None and ended.result == result
                return _ack(
                    result.attempt,
                    lease_pb2.COMPLETION_STATUS_DUPLICATE if same else lease_pb2.COMPLETION_STATUS_LEASE_LOST,
                )
        held = session.held.get(result.attempt)
        if held is None or (held.lease_id, held.epoch) != (result.lease_id, result.epoch):
            return _ack(result.attempt, lease_pb2.COMPLETION_STATUS_LEASE_LOST)
        self._conclude(session, result.attempt, result.failure_kind, result)
        return _ack(result.attempt, lease_pb2.COMPLETION_STATUS_APPLIED)

    def _conclude(self, session: Session, attempt: str, kind: int, result: lease_pb2.AttemptResult | None) -> None:
        if session.held.pop(attempt, None) is None:
            return
        name = parse_attempt_name(attempt).rollout
        entry = self.entries[name]
        entry.ended.append(Attempted(attempt=attempt, failure_kind=kind, result=result))
        counted = sum(ended.failure_kind != FREE_OF_CHARGE for ended in entry.ended)
        if kind == FREE_OF_CHARGE or (kind in RETRIED and counted < (entry.rollout.policy.max_attempts or 3)):
            self._queue.append(name)
            self._dispatch()
        else:
            entry.final = True

    def _dispatch(self) -> None:
        for session in self._sessions.values():
            batch = []
            while self._queue and session.credits and session.outgoing is not None:
                batch.append(self._grant(session, self._queue.popleft()))
                session.credits -= 1
            if batch and session.outgoing is not None:
                assign = messages.AssignedAttempts(assignments=batch)
                session.outgoing.put_nowait(messages.StreamLeasesResponse(assign=assign))

    def _grant(self, session: Session, name: str) -> lease_pb2.Assignment:
        entry = self.entries[name]
        entry.granted_count += 1
        number = entry.granted_count
        attempt = attempt_of(name, number)
        timeout_s = entry.rollout.policy.attempt_timeout.ToTimedelta().total_seconds() or DEFAULT_TIMEOUT_S
        key = self._signer.attempt_key(
            parse_attempt_name(attempt),
            project="projects/default",
            lease_id=session.session_id,
            epoch=number,
            mode="train",
            ttl_s=timeout_s + 60,
        )
        assignment = lease_pb2.Assignment(
            attempt=attempt,
            lease_id=session.session_id,
            epoch=number,
            rollout=entry.rollout,
            attempt_key=key,
            timeout=_duration(timeout_s),
        )
        session.held[attempt] = assignment
        self.most_held = max(self.most_held, len(session.held))
        return assignment

    def _renew(self, session: Session) -> None:
        if session.expiry is not None:
            session.expiry.cancel()
        session.expiry = asyncio.get_running_loop().call_later(self._ttl_s, self._end, session)

    def _end(self, session: Session) -> None:
        self._sessions.pop(runner_name(session.session_id), None)
        if session.expiry is not None:
            session.expiry.cancel()
        for attempt in list(session.held):
            self._conclude(session, attempt, failure_pb2.FAILURE_KIND_LEASE_LOST, None)
        # Kept until it runs: the loop itself only holds tasks weakly.
        self._notifying = asyncio.ensure_future(self._notify())

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


def _ack(attempt: str, status: lease_pb2.CompletionStatus, message: str = "") -> lease_pb2.CompletionAck:
    return lease_pb2.CompletionAck(attempt=attempt, status=status, message=message)


def _duration(seconds: float) -> Duration:
    return Duration(seconds=int(seconds), nanos=int(seconds % 1 * 1e9))
