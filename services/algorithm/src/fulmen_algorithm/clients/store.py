"""The store as one run sees it: queue, feed, spans and resources."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import grpc.aio
from google.protobuf.duration_pb2 import Duration

from fulmen.errors import InternalError, QuotaExceeded
from fulmen.ids import parse_rollout_name, uuid7_unix_ms
from fulmen.rpc.channel import FulmenChannel, ResponseStream
from fulmen.rpc.resource_contents import read_resources
from fulmen.store.v1 import (
    resource_pb2,
    resource_service_pb2,
    rollout_pb2,
    rollout_service_pb2,
    run_lease_service_pb2,
    span_service_pb2,
)
from fulmen.store.v1.resource_service_pb2_grpc import ResourceServiceStub
from fulmen.store.v1.rollout_service_pb2_grpc import RolloutServiceStub
from fulmen.store.v1.span_pb2 import SpanChunk
from fulmen.store.v1.span_service_pb2_grpc import SpanServiceStub
from fulmen_algorithm.clients.decode import FeedGroups, rollout_trajectory
from fulmen_algorithm.clients.patience import AWAY, FIRST_WAIT_S, Outage, Patience
from fulmen_algorithm.rollouts.groups import FinishedGroup, GroupSpec, Mode, of_branch, train_index
from fulmen_algorithm.rollouts.trajectory import RolloutTrajectory
from fulmen_algorithm.runs.ports import Content, RunFence

CALL_DEADLINE_S = 20.0
SPANS_DEADLINE_S = 60.0
FEED_SILENCE_S = 45.0
"""The store sends a keep-alive every 15 s; a feed that is silent for three of them is dead."""
LIST_PAGE = 1000
ROLLOUTS_PER_REQUEST = 1000
BYTES_PER_REQUEST = 4 * 1024 * 1024
"""Bytes of tasks in a request of several groups, a fifth of what the store accepts by default."""
ATTEMPTS_PER_REQUEST = 512

_MODES = {
    Mode.TRAIN: rollout_pb2.ROLLOUT_MODE_TRAIN,
    Mode.VALIDATION: rollout_pb2.ROLLOUT_MODE_VALIDATION,
    Mode.TEST: rollout_pb2.ROLLOUT_MODE_TEST,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRequest:
    """Fields shared by all rollouts of a run.

    Attributes:
        project: `projects/{project}`.
        training_run: `projects/{project}/trainingRuns/{id}`.
        agent: Pinned version of the agent; empty for the runner's own.
        attempt_timeout_s: Limit of one attempt, in seconds.
        max_attempts: Attempts of one rollout.
        restart_lost: Whether an attempt after a lost one samples everything anew.
        fence: Epoch under which this service runs the run.
        resource_versions: Pinned versions of further resources, by the name under which the agent asks for them.
    """

    project: str
    training_run: str
    agent: str
    attempt_timeout_s: float
    max_attempts: int
    fence: RunFence
    resource_versions: Mapping[str, str] = field(default_factory=dict)
    restart_lost: bool = False


Item = TypeVar("Item")


class StoreQueue:
    """The queue and the feed of one run."""

    def __init__(self, channel: FulmenChannel, request: RolloutRequest, patience: Patience) -> None:
        self._rollouts = RolloutServiceStub(channel)
        self._spans = SpanServiceStub(channel)
        self._request = request
        self._patience = patience

    async def submit(self, groups: Sequence[GroupSpec]) -> None:
        """Submits groups in order, in as few requests as possible.

        Groups other than training groups are always the same in one call, so that their request ids make repeated calls
        harmless. Which training groups go together differs after a crash. They are created once because a later life of
        the run has a later epoch: the store refuses what an earlier one still sends, and the later one first asks which
        groups are there.
        """
        for chunk in _requests([g for g in groups if g.mode is Mode.TRAIN]):
            await self._create(chunk, f"{chunk[0].group_id}+{len(chunk)}" if len(chunk) > 1 else chunk[0].group_id)
        for chunk in _requests([g for g in groups if g.mode is not Mode.TRAIN]):
            await self._create(chunk, chunk[0].group_id)

    async def _create(self, groups: Sequence[GroupSpec], request: str) -> None:
        """Creates groups, all or none; in a full queue one after another, as there is room."""
        message = rollout_service_pb2.BatchCreateRolloutsRequest(
            rollouts=[self._rollout(group) for group in groups for _ in range(group.size)],
            # Request ids are a project's own, and shorter than the longest name of a run.
            request_id=f"{self._request.training_run.rpartition('/')[2]}/{request}",
            run_fence=_fence(self._request.fence),
        )
        full_since: float | None = None
        while True:
            try:
                await self._patience.call(lambda: self._rollouts.BatchCreateRollouts(message, timeout=CALL_DEADLINE_S))
            except QuotaExceeded as error:
                if len(groups) > 1:
                    for group in groups:
                        await self._create([group], group.group_id)
                    return
                if full_since is None:
                    full_since = time.monotonic()
                    self._patience.notify("warning", f"The run waits for space in the queue: {error.message}")
                if time.monotonic() - full_since > self._patience.limit_s:
                    raise
                await asyncio.sleep(error.retry_after_s or FIRST_WAIT_S)
            else:
                return

    def _rollout(self, group: GroupSpec) -> rollout_pb2.Rollout:
        timeout = Duration()
        timeout.FromMilliseconds(int(self._request.attempt_timeout_s * 1000))
        return rollout_pb2.Rollout(
            project=self._request.project,
            training_run=self._request.training_run,
            group_id=group.group_id,
            group_size=group.size,
            mode=_MODES[group.mode],
            input=group.task,
            agent=self._request.agent,
            resource_versions={**self._request.resource_versions, **group.resource_versions},
            priority=group.priority,
            policy=rollout_pb2.RolloutPolicy(
                max_attempts=self._request.max_attempts,
                attempt_timeout=timeout,
                restart_lost=self._request.restart_lost,
            ),
        )

    async def watch(self, cursor: str) -> AsyncIterator[FinishedGroup]:
        """Yields finished groups in feed order, without end; after an outage it resumes after the last one yielded."""
        outage = Outage(patience=self._patience)
        while True:
            groups = FeedGroups()
            stream = self._rollouts.WatchRollouts(
                rollout_service_pb2.WatchRolloutsRequest(
                    project=self._request.project, training_run=self._request.training_run, cursor=cursor
                )
            )
            try:
                while (message := await _read(stream)) is not None:
                    outage.over()
                    for part in message.groups:
                        group = groups.add(part)
                        if group is not None:
                            cursor = group.cursor
                            yield group
                    cursor = message.cursor or cursor
            except AWAY:
                if outage.too_long:
                    raise
            except InternalError as error:
                # Without an id, the error is of a broken connection and not of the store.
                if "error_id" in error.metadata or outage.too_long:
                    raise
            finally:
                stream.cancel()
            await outage.wait()

    async def finished_of(self, training_run: str) -> list[FinishedGroup]:
        """Reads the finished groups of another run; see `ports.RolloutQueue`."""
        return await self._patience.call(partial(self._feed_of, training_run))

    async def _feed_of(self, training_run: str) -> list[FinishedGroup]:
        stream = self._rollouts.WatchRollouts(
            rollout_service_pb2.WatchRolloutsRequest(project=self._request.project, training_run=training_run)
        )
        found: list[FinishedGroup] = []
        groups = FeedGroups()
        try:
            # The first message without groups marks the end of the stored feed.
            while (message := await _read(stream)) is not None and message.groups:
                found += [group for part in message.groups if (group := groups.add(part)) is not None]
        finally:
            stream.cancel()
        return found

    async def trajectories(self, attempts: Sequence[str]) -> dict[str, RolloutTrajectory]:
        """Reads the trajectories of attempts, by attempt name; an attempt without a captured call is unusable."""
        found: dict[str, RolloutTrajectory] = {}
        for names in _chunked(attempts, ATTEMPTS_PER_REQUEST):
            chunks = await self._patience.call(partial(self._chunks, names))
            by_attempt: dict[str, list[SpanChunk]] = {name: [] for name in names}
            for chunk in chunks:
                if chunk.attempt in by_attempt:
                    by_attempt[chunk.attempt].append(chunk)
            # Decoding holds the GIL for milliseconds; in a thread it does not delay feeds and rpcs.
            found |= await asyncio.to_thread(_decoded, by_attempt)
        return found

    async def _chunks(self, names: Iterable[str]) -> list[SpanChunk]:
        request = span_service_pb2.StreamSpansRequest(parents=list(names))
        stream = self._spans.StreamSpans(request, timeout=SPANS_DEADLINE_S)
        return [chunk async for message in stream for chunk in message.chunks]

    async def known_train_groups(self, *, below: int, branch: int) -> set[int]:
        """Lists indices of a branch's training groups from the newest back to the first one under `below`."""
        known: set[int] = set()
        passed_ms, token = 0, ""
        while True:
            message = rollout_service_pb2.ListRolloutsRequest(
                project=self._request.project,
                training_run=self._request.training_run,
                page_size=LIST_PAGE,
                page_token=token,
            )
            page = await self._patience.call(partial(self._rollouts.ListRollouts, message, timeout=CALL_DEADLINE_S))
            for rollout in page.rollouts:
                created_ms = uuid7_unix_ms(parse_rollout_name(rollout.name).rollout_id)
                # Requests are in order of index and branch; the rollouts of one have the same time, in any order.
                if created_ms < passed_ms:
                    return known
                plain_id = of_branch(rollout.group_id, branch)
                index = None if plain_id is None else train_index(plain_id)
                if index is not None and index >= below:
                    known.add(index)
                elif index is not None or plain_id is None:
                    passed_ms = created_ms
            token = page.next_page_token
            if not token:
                return known

    async def cancel_all(self) -> None:
        """Cancels every rollout of the run that is not final."""
        message = rollout_service_pb2.CancelRolloutsRequest(
            training_run=self._request.training_run,
            project=self._request.project,
            run_fence=_fence(self._request.fence),
        )
        await self._patience.call(lambda: self._rollouts.CancelRollouts(message, timeout=CALL_DEADLINE_S))


class StoreResources:
    """The resources of one project."""

    def __init__(
        self, channel: FulmenChannel, project: str, patience: Patience, *, fence: RunFence | None = None
    ) -> None:
        self._resources = ResourceServiceStub(channel)
        self._rollouts = RolloutServiceStub(channel)
        self._project = project
        self._patience = patience
        self._fence = _fence(fence)

    async def has_rollouts(self, training_run: str) -> bool:
        """Returns whether a run has rollouts; see `ports.ResourceStore`."""
        message = rollout_service_pb2.ListRolloutsRequest(project=self._project, training_run=training_run, page_size=1)
        answer = await self._patience.call(lambda: self._rollouts.ListRollouts(message, timeout=CALL_DEADLINE_S))
        return bool(answer.rollouts)

    async def get(self, name: str) -> Content:
        """Reads a version with its content; see `ports.ResourceStore`."""
        reading = partial(read_resources, self._resources, [name], project=self._project, timeout=CALL_DEADLINE_S)
        (version,) = await self._patience.call(reading)
        return _content(version)

    async def publish(
        self, *, resource: str, kind: str, content: bytes, content_type: str, parent: str, request_id: str
    ) -> Content:
        """Publishes a version; see `ports.ResourceStore`."""
        version = resource_pb2.ResourceVersion(
            name=resource,
            project=self._project,
            kind=kind,
            content=content,
            content_type=content_type,
            parent=parent,
        )
        message = resource_service_pb2.PublishResourcesRequest(
            resources=[version], request_id=request_id, run_fence=self._fence
        )
        answer = await self._patience.call(lambda: self._resources.PublishResources(message, timeout=CALL_DEADLINE_S))
        return _content(answer.resources[0])

    async def point(self, resource: str, alias: str, version: int) -> None:
        """Points an alias to a version; see `ports.ResourceStore`."""
        message = resource_service_pb2.SetAliasRequest(
            name=f"{resource}/aliases/{alias}", version=version, project=self._project, run_fence=self._fence
        )
        await self._patience.call(lambda: self._resources.SetAlias(message, timeout=CALL_DEADLINE_S))


def _fence(fence: RunFence | None) -> run_lease_service_pb2.RunFence | None:
    if fence is None:
        return None
    return run_lease_service_pb2.RunFence(training_run=fence.training_run, epoch=fence.epoch)


def _requests(groups: Sequence[GroupSpec]) -> list[list[GroupSpec]]:
    """Distributes whole groups over requests, in order: at most `ROLLOUTS_PER_REQUEST` rollouts and
    `BYTES_PER_REQUEST` bytes of tasks, unless one group alone is larger.
    """
    requests: list[list[GroupSpec]] = []
    room = room_bytes = 0
    for group in groups:
        size_bytes = group.size * len(group.task)
        if group.size > room or size_bytes > room_bytes:
            requests.append([])
            room, room_bytes = ROLLOUTS_PER_REQUEST, BYTES_PER_REQUEST
        requests[-1].append(group)
        room -= group.size
        room_bytes -= size_bytes
    return requests


def _chunked(items: Sequence[Item], size: int) -> list[Sequence[Item]]:
    return [items[start : start + size] for start in range(0, len(items), size)]


async def _read(
    stream: ResponseStream[rollout_service_pb2.WatchRolloutsResponse],
) -> rollout_service_pb2.WatchRolloutsResponse | None:
    async with asyncio.timeout(FEED_SILENCE_S):
        message = await stream.read()
    return None if message is grpc.aio.EOF else message


def _decoded(by_attempt: dict[str, list[SpanChunk]]) -> dict[str, RolloutTrajectory]:
    return {attempt: rollout_trajectory(chunks) for attempt, chunks in by_attempt.items()}


def _content(version: resource_pb2.ResourceVersion) -> Content:
    return Content(name=version.name, version=version.version, data=version.content, kind=version.kind)
