"""A real store in the test's own process: real PostgreSQL, a real gRPC socket, short intervals."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from pydantic import SecretStr

from fulmen.ids import parse_runner_name, runner_name
from fulmen.rpc.channel import FulmenChannel, open_channel
from fulmen.store.v1 import (
    annotation_service_pb2_grpc,
    audit_service_pb2_grpc,
    call_service_pb2_grpc,
    effect_service_pb2_grpc,
    lease_pb2,
    lease_service_pb2,
    lease_service_pb2_grpc,
    project_service_pb2,
    project_service_pb2_grpc,
    queue_service_pb2_grpc,
    resource_service_pb2_grpc,
    rollout_pb2,
    rollout_service_pb2,
    rollout_service_pb2_grpc,
    run_history_service_pb2_grpc,
    run_lease_service_pb2_grpc,
    runner_registry_service_pb2_grpc,
    schedule_service_pb2_grpc,
    secret_service_pb2_grpc,
    span_service_pb2_grpc,
    stored_response_service_pb2_grpc,
    usage_service_pb2_grpc,
)
from fulmen_service_kit.security.tokens import Role, TokenSigner
from fulmen_store.app import build
from fulmen_store.settings import StoreSettings

__all__ = ["SIGNING_KEY", "Runner", "StoreHandle", "running_store"]

SIGNING_KEY = "a signing key of tests, 32 bytes or more"
LIMIT_S = 20.0


class Stubs:
    """The store's stubs over one channel."""

    def __init__(self, channel: FulmenChannel) -> None:
        self.rollouts = rollout_service_pb2_grpc.RolloutServiceStub(channel)
        self.queues = queue_service_pb2_grpc.QueueServiceStub(channel)
        self.leases = lease_service_pb2_grpc.LeaseServiceStub(channel)
        self.spans = span_service_pb2_grpc.SpanServiceStub(channel)
        self.resources = resource_service_pb2_grpc.ResourceServiceStub(channel)
        self.projects = project_service_pb2_grpc.ProjectServiceStub(channel)
        self.run_leases = run_lease_service_pb2_grpc.RunLeaseServiceStub(channel)
        self.usage = usage_service_pb2_grpc.UsageServiceStub(channel)
        self.calls = call_service_pb2_grpc.CallServiceStub(channel)
        self.stored_responses = stored_response_service_pb2_grpc.StoredResponseServiceStub(channel)
        self.effects = effect_service_pb2_grpc.EffectServiceStub(channel)
        self.run_history = run_history_service_pb2_grpc.RunHistoryServiceStub(channel)
        self.annotations = annotation_service_pb2_grpc.AnnotationServiceStub(channel)
        self.audit = audit_service_pb2_grpc.AuditServiceStub(channel)
        self.schedules = schedule_service_pb2_grpc.ScheduleServiceStub(channel)
        self.secrets = secret_service_pb2_grpc.SecretServiceStub(channel)
        self.runners = runner_registry_service_pb2_grpc.RunnerRegistryServiceStub(channel)


@dataclass(slots=True, kw_only=True)
class StoreHandle:
    """A running store and the means to call it."""

    port: int
    parts: Any
    stack: AsyncExitStack

    @property
    def target(self) -> str:
        """Where it listens."""
        return f"127.0.0.1:{self.port}"

    def token(self, role: Role = Role.ADMIN, *, project: str | None = None, subject: str = "tests") -> str:
        """Makes a token, bound to what is usual for the role unless a project is given."""
        return TokenSigner(SIGNING_KEY).issue(role, subject=subject, ttl_s=600, project=project)

    async def stubs(self, *, role: Role = Role.ADMIN, project: str | None = None, token: str = "") -> Stubs:
        """Opens a channel that is closed with the store."""
        channel = open_channel(self.target, token=token or self.token(role, project=project))
        await self.stack.enter_async_context(channel)
        return Stubs(channel)


def engine_token(training_run: str, *, ttl_s: float = 600) -> str:
    """Makes the token of an engine."""
    return run_token(training_run, role=Role.ENGINE, ttl_s=ttl_s)


def run_token(training_run: str, *, role: str, ttl_s: float = 600) -> str:
    """Makes the token of a machine that belongs to a run."""
    project = training_run.partition("/trainingRuns/")[0]
    signer = TokenSigner(SIGNING_KEY)
    return signer.issue(Role(role), subject="machine", ttl_s=ttl_s, project=project, training_run=training_run)


@asynccontextmanager
async def running_store(dsn: str, **settings: Any) -> AsyncIterator[StoreHandle]:
    """Runs a store in this process for as long as the context lasts; a role that dies fails the test."""
    values: dict[str, Any] = {"port": 0, "http_port": 0, "lease_ttl_s": 6.0, "poll_interval_s": 0.05}
    values |= {
        "drain_notice_s": 0.1,
        "signing_key": SecretStr(SIGNING_KEY),
        "database_url": SecretStr(dsn),
        "database_connections": 4,
    }
    resolved = StoreSettings(**(values | settings))
    async with AsyncExitStack() as stack:
        parts = await build(resolved, stack)
        await parts.server.server.start()
        roles = {name: asyncio.create_task(role.run(), name=name) for name, role in parts.roles.items()}
        clients = AsyncExitStack()
        try:
            yield StoreHandle(port=parts.server.port, parts=parts, stack=clients)
        finally:
            await clients.aclose()
            await parts.server.server.stop(grace=0)
            dead = [task for task in roles.values() if task.done()]
            for task in roles.values():
                task.cancel()
            await asyncio.gather(*roles.values(), return_exceptions=True)
            for task in dead:
                task.result()


@asynccontextmanager
async def replicas(dsn: str, count: int, **settings: Any) -> AsyncIterator[list[StoreHandle]]:
    """Runs several stores that know one another."""
    async with AsyncExitStack() as stack:
        handles = [await stack.enter_async_context(running_store(dsn, **settings)) for _ in range(count)]
        await meet(*handles)
        yield handles


async def meet(*handles: StoreHandle) -> None:
    """Renews each replica's membership twice, so that the first knows the last and how many runners each has."""
    for _ in range(2):
        for handle in handles:
            await handle.parts.roles["membership-renewer"].renew_once()


class Runner:
    """A lease stream as a runner has it; messages that were read and not expected stay in `inbox`."""

    def __init__(self, stubs: Stubs) -> None:
        self._stubs = stubs
        self.stream: Any = None
        self.opened: Any = None
        self.session_id = ""
        self.inbox: list[lease_service_pb2.StreamLeasesResponse] = []

    async def open(
        self, *, session_id: str = "", running: list[str] | None = None, labels: dict[str, str] | None = None
    ) -> Runner:
        """Opens the stream, or resumes a session."""
        self.stream = self._stubs.leases.StreamLeases()
        await self.stream.write(
            lease_service_pb2.StreamLeasesRequest(
                open=lease_service_pb2.OpenSession(
                    runner=runner_name(session_id) if session_id else "",
                    info=lease_pb2.RunnerInfo(host="test-host", labels=labels or {}, slot_count=1),
                    running_attempts=running or [],
                )
            )
        )
        self.opened = (await self.read()).opened
        self.session_id = str(parse_runner_name(self.opened.runner))
        return self

    async def read(self) -> lease_service_pb2.StreamLeasesResponse:
        """Reads one message."""
        async with asyncio.timeout(LIMIT_S):
            message: lease_service_pb2.StreamLeasesResponse = await self.stream.read()
        return message

    async def expect(self, kind: str) -> Any:
        """Reads until a message of one kind comes."""
        for index, message in enumerate(self.inbox):
            if message.WhichOneof("message") == kind:
                return getattr(self.inbox.pop(index), kind)
        while True:
            message = await self.read()
            if message.WhichOneof("message") == kind:
                return getattr(message, kind)
            self.inbox.append(message)

    async def demand(self, count: int) -> None:
        """Grants credit."""
        await self.stream.write(
            lease_service_pb2.StreamLeasesRequest(add_credits=lease_service_pb2.AddCredits(credit_count=count))
        )

    async def take(self, count: int) -> list[lease_pb2.Assignment]:
        """Grants credit and reads so many assignments."""
        await self.demand(count)
        taken: list[lease_pb2.Assignment] = []
        while len(taken) < count:
            taken += (await self.expect("assign")).assignments
        return taken

    async def complete(self, assignments: list[lease_pb2.Assignment], **result: Any) -> list[int]:
        """Reports attempts and returns the statuses of the answer."""
        await self.stream.write(
            lease_service_pb2.StreamLeasesRequest(
                complete=lease_service_pb2.CompletedAttempts(results=results_of(assignments, **result))
            )
        )
        return [ack.status for ack in (await self.expect("ack")).acks]

    async def release(self, assignments: list[lease_pb2.Assignment]) -> list[int]:
        """Gives leases back and returns the statuses of the answer."""
        released = lease_service_pb2.ReleasedAttempts(attempts=[one.attempt for one in assignments])
        await self.stream.write(lease_service_pb2.StreamLeasesRequest(release=released))
        return [ack.status for ack in (await self.expect("ack")).acks]


def results_of(assignments: list[lease_pb2.Assignment], **result: Any) -> list[lease_pb2.AttemptResult]:
    """Makes one result for each assignment."""
    return [
        lease_pb2.AttemptResult(attempt=one.attempt, lease_id=one.lease_id, epoch=one.epoch, **result)
        for one in assignments
    ]


async def create(stubs: Stubs, count: int = 1, *, request_id: str = "", **fields: Any) -> list[str]:
    """Creates equal rollouts and returns their names."""
    response = await stubs.rollouts.BatchCreateRollouts(
        rollout_service_pb2.BatchCreateRolloutsRequest(
            rollouts=[rollout_pb2.Rollout(**fields) for _ in range(count)], request_id=request_id
        )
    )
    return [rollout.name for rollout in response.rollouts]


async def cancel(stubs: Stubs, *names: str) -> tuple[int, int]:
    """Cancels rollouts; returns how many are cancelled and how many are asked to stop."""
    answer = await stubs.rollouts.CancelRollouts(rollout_service_pb2.CancelRolloutsRequest(names=names))
    return answer.cancelled_count, answer.cancelling_count


async def report(stubs: Stubs, assignments: list[lease_pb2.Assignment], **result: Any) -> list[int]:
    """Reports attempts by a call and returns the statuses of the answer."""
    request = lease_service_pb2.CompleteAttemptsRequest(results=results_of(assignments, **result))
    return [ack.status for ack in (await stubs.leases.CompleteAttempts(request)).acks]


async def queue_stats(stubs: Stubs, **selection: Any) -> rollout_service_pb2.GetQueueStatsResponse:
    """Returns the statistics of a queue."""
    request = rollout_service_pb2.GetQueueStatsRequest(**selection)
    answer: rollout_service_pb2.GetQueueStatsResponse = await stubs.rollouts.GetQueueStats(request)
    return answer


async def pages_of(call: Any, request: Any) -> list[Any]:
    """Returns every page of a list."""
    pages = [await call(request)]
    while pages[-1].next_page_token:
        request.page_token = pages[-1].next_page_token
        pages.append(await call(request))
    return pages


async def create_project(stubs: Stubs, name: str, **fields: Any) -> project_service_pb2.Project:
    """Creates a project with an administrator's stubs."""
    project = project_service_pb2.Project(name=name, **fields)
    response = await stubs.projects.CreateProject(project_service_pb2.CreateProjectRequest(project=project))
    created: project_service_pb2.Project = response.project
    return created


async def get(stubs: Stubs, name: str) -> rollout_pb2.Rollout:
    """Returns one rollout."""
    response = await stubs.rollouts.GetRollout(rollout_service_pb2.GetRolloutRequest(name=name))
    rollout: rollout_pb2.Rollout = response.rollout
    return rollout


async def until_state(stubs: Stubs, name: str, state: int) -> rollout_pb2.Rollout:
    """Waits until a rollout is in a state."""
    async with asyncio.timeout(LIMIT_S):
        while (rollout := await get(stubs, name)).state != state:  # noqa: ASYNC110  # state of another process
            await asyncio.sleep(0.02)
        return rollout


async def until_queued(stubs: Stubs, count: int) -> None:
    """Waits until the statistics, which may be cached, count so many queued rollouts."""
    async with asyncio.timeout(LIMIT_S):
        while (await queue_stats(stubs)).queued_count != count:  # noqa: ASYNC110  # state of the store
            await asyncio.sleep(0.02)


async def read_feed(
    stubs: Stubs, *, groups: int, cursor: str = "", **selection: Any
) -> tuple[list[rollout_service_pb2.FinishedGroup], str]:
    """Reads so many finished groups, and the cursor after them."""
    stream = stubs.rollouts.WatchRollouts(rollout_service_pb2.WatchRolloutsRequest(cursor=cursor, **selection))
    found: list[rollout_service_pb2.FinishedGroup] = []
    async with asyncio.timeout(LIMIT_S):
        while len(found) < groups:
            message = await stream.read()
            found += message.groups
    stream.cancel()
    return found, found[groups - 1].cursor if found else cursor
