"""Rollouts: create, wait, list, count, stream, watch, update, cancel, retry, delete."""

from __future__ import annotations

import asyncio
import builtins
import datetime
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

from fulmen.client.aio.base import Part, Session, listed
from fulmen.client.frames import rollouts_frame
from fulmen.client.rollouts import Attempt, Group, Rollout, RolloutChanges, RolloutCount
from fulmen.client.view import Named, name_of
from fulmen.messages import enum_number, timestamp
from fulmen.store.v1 import (
    resource_service_pb2,
    rollout_changes_pb2,
    rollout_pb2,
    rollout_selection_pb2,
    rollout_service_pb2,
)
from fulmen.training.following import follow_changes, follow_groups
from fulmen.training.tasks import Tasks, task_lines

__all__ = ["AsyncRolloutQuery", "AsyncRollouts"]

BATCH_SIZE = 1000
READ_AT_ONCE = 16
FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 0.8


class AsyncRolloutQuery:
    """Rollouts that a filter selects, newest first; read when they are iterated over."""

    def __init__(
        self, session: Session, request: rollout_service_pb2.ListRolloutsRequest, *, limit: int | None, details: bool
    ) -> None:
        """Reads nothing yet."""
        self._session = session
        self._request = request
        self._limit = limit
        self._details = details

    async def __aiter__(self) -> AsyncIterator[Rollout]:
        """Iterates over the rollouts.

        Raises:
            ArgumentInvalid: if the filter is malformed.
        """
        services = self._session.services
        request = rollout_service_pb2.ListRolloutsRequest()
        request.CopyFrom(self._request)
        waiting: list[rollout_pb2.Rollout] = []
        async for each in listed(services.rollouts.ListRollouts, request, "rollouts", self._limit):
            if not self._details:
                yield Rollout(each)
                continue
            waiting.append(each)
            if len(waiting) == READ_AT_ONCE:
                for rollout in await read(self._session, [waited.name for waited in waiting]):
                    yield rollout
                waiting = []
        for rollout in await read(self._session, [waited.name for waited in waiting]):
            yield rollout

    async def to_list(self) -> list[Rollout]:
        """Returns all selected rollouts as a list."""
        return [each async for each in self]

    async def to_pandas(self) -> Any:
        """Returns a `pandas.DataFrame` with one row per rollout.

        Its columns: rollout, state, failure, mode, group, training_run, reward, attempts (count), duration_s (of the
        deciding attempt, seconds), task, output, failure_message, created and ended (UTC).

        Raises:
            ExtraMissing: if pandas is not installed.
        """
        return rollouts_frame(await self.to_list())


class AsyncRollouts(Part):
    """The queue of rollouts."""

    async def create(
        self,
        agent: str | Named,
        tasks: Tasks,
        *,
        mode: str = "test",
        group_id: str = "",
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> builtins.list[Rollout]:
        """Adds rollouts to the queue, one for each task.

        >>> rollouts = await client.rollouts.create("echo", [{"input": "one"}, {"input": "two"}])
        >>> [rollout.state for rollout in rollouts]
        ['queued', 'queued']

        Args:
            agent: name of a published agent, for its latest version, or a version of it.
            tasks: one task or several, as in `client.train`.
            mode: `train`, `validation` or `test`.
            group_id: id of the group that all of them form; empty if each is alone.
            priority: -100 to 100; higher ones run first.
            timeout_s: limit of one attempt, seconds; None for 15 minutes.

        Raises:
            ResourceNotFound: if the agent does not exist.
            QuotaExceeded: if the project's quota of queued rollouts is used up.
            ConfigError: if a task is malformed; lists all problems.
        """
        version = await self._version(name_of(agent))
        inputs = [line.rstrip(b"\n") for line in task_lines(tasks, "tasks")]
        wanted = [
            rollout_pb2.Rollout(
                agent=version,
                input=each,
                mode=enum_number(rollout_pb2.RolloutMode, mode),
                group_id=group_id,
                group_size=len(inputs) if group_id else 0,
                priority=priority,
            )
            for each in inputs
        ]
        for each in wanted if timeout_s is not None else ():
            each.policy.attempt_timeout.FromNanoseconds(round((timeout_s or 0.0) * 1e9))
        created: list[Rollout] = []
        for start in range(0, len(wanted), BATCH_SIZE):
            request = rollout_service_pb2.BatchCreateRolloutsRequest(rollouts=wanted[start : start + BATCH_SIZE])
            answer = await self._services.rollouts.BatchCreateRollouts(request)
            created += [Rollout(each) for each in answer.rollouts]
        return created

    async def get(self, rollout: str | Named, *, printed: bool = False) -> Rollout:
        """Returns a rollout with its latest attempts.

        Args:
            rollout: its name, its UUID or its record.
            printed: whether to also read the end of what each attempt printed.

        Raises:
            RolloutNotFound: if there is none.
        """
        request = rollout_service_pb2.GetRolloutRequest(name=self._session.rollout(rollout), with_printed=printed)
        return Rollout((await self._services.rollouts.GetRollout(request)).rollout)

    async def attempts(self, rollout: str | Named) -> AsyncIterator[Attempt]:
        """Yields all ended attempts of a rollout, oldest first; the rollout itself has the latest 16.

        >>> [done] = await client.rollouts.wait(await client.rollouts.create("echo", {"input": "hello"}))
        >>> [attempt.state async for attempt in client.rollouts.attempts(done)]
        ['succeeded']

        Args:
            rollout: its name, its UUID or its record.

        Raises:
            RolloutNotFound: if there is none.
        """
        request = rollout_service_pb2.ListAttemptsRequest(parent=self._session.rollout(rollout))
        async for each in listed(self._services.rollouts.ListAttempts, request, "attempts"):
            yield Attempt(each)

    def list(
        self,
        *,
        run: str | Named | None = None,
        states: Sequence[str] = (),
        filter: str = "",
        limit: int | None = None,
        details: bool = True,
    ) -> AsyncRolloutQuery:
        """Selects rollouts, newest first.

        >>> await client.rollouts.wait(await client.rollouts.create("echo", {"input": "hello"}))
        [Rollout(name='projects/default/rollouts/...', state='succeeded', reward=1.0)]
        >>> newest = await client.rollouts.list(states=["succeeded"], filter="mode = TEST", limit=1).to_list()
        >>> [rollout.reward for rollout in newest]
        [1.0]

        Args:
            run: only rollouts of this training run.
            states: only those in these states, such as `succeeded`.
            filter: only those that match, in the grammar of AIP-160, such as `mode = VALIDATION AND priority >= 1`.
            limit: maximum number; None for all.
            details: whether to read tasks, attempts and rewards, a call for each; lists leave them out.
        """
        request = rollout_service_pb2.ListRolloutsRequest(
            project=self._session.project,
            training_run=self._session.run(run),
            states=[enum_number(rollout_pb2.RolloutState, each) for each in states],
            filter=filter,
        )
        return AsyncRolloutQuery(self._session, request, limit=limit, details=details)

    async def count(
        self,
        *,
        run: str | Named | None = None,
        states: Sequence[str] = (),
        filter: str = "",
        facets: Sequence[str] = (),
    ) -> RolloutCount:
        """Counts rollouts, in at most two seconds.

        >>> await client.rollouts.wait(await client.rollouts.create("echo", {"input": "hello"}))
        [Rollout(name='projects/default/rollouts/...', state='succeeded', reward=1.0)]
        >>> found = await client.rollouts.count(filter="reward = 1")
        >>> found.count == found.states["succeeded"], found.has_more
        (True, False)
        >>> found = await client.rollouts.count(filter="reward = 1", facets=["reward", "agent"])
        >>> found.facets["reward"] == {"1": found.count}
        True

        Args:
            run: only rollouts of this training run.
            states: only those in these states.
            filter: only those that match, as in `list`.
            facets: fields whose values are counted: `state`, `failure_kind`, `mode`, `task_type`, `agent`,
                `training_run`, `reward` (in ranges), `resource_versions`, `required_labels` and `metadata`.

        Raises:
            ArgumentInvalid: if the filter is malformed.
        """
        request = rollout_selection_pb2.CountRolloutsRequest(
            project=self._session.project,
            training_run=self._session.run(run),
            states=[enum_number(rollout_pb2.RolloutState, each) for each in states],
            filter=filter,
            facets=facets,
        )
        return RolloutCount(await self._services.rollouts.CountRollouts(request))

    async def wait(
        self, rollouts: str | Named | Iterable[str | Named], *, timeout_s: float | None = None
    ) -> builtins.list[Rollout]:
        """Waits until rollouts are final; returns them with their attempts, in the given order.

        >>> [done] = await client.rollouts.wait(await client.rollouts.create("echo", {"input": "hello"}))
        >>> done.state, done.output, done.reward
        ('succeeded', 'hello', 1.0)

        Args:
            rollouts: names, UUIDs or records.
            timeout_s: seconds after which to give up; None for never.

        Raises:
            TimeoutError: if they are not final in time; they continue to run.
            RolloutNotFound: if one does not exist.
        """
        single = isinstance(rollouts, str) or hasattr(rollouts, "name")
        given: Iterable[Any] = [rollouts] if single else rollouts  # type: ignore[assignment]
        names = [self._session.rollout(each) for each in given]
        found: list[Rollout] = []
        async with asyncio.timeout(timeout_s):
            # One after the other: however many they are, one call at a time asks for those that still run.
            for name in names:
                found += await read(self._session, [name])
                pause_s = FIRST_PAUSE_S
                while not found[-1].is_final:
                    await asyncio.sleep(pause_s)
                    pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
                    found[-1:] = await read(self._session, [name])
        return found

    async def stream(self, *, run: str | Named | None = None, cursor: str = "") -> AsyncIterator[Group]:
        """Yields groups of rollouts as they finish, endlessly and across restarts of the store.

        >>> async for group in client.rollouts.stream():
        ...     print(group.rollouts[0].state)
        ...     break
        succeeded

        Args:
            run: only rollouts of this training run; None for the whole project.
            cursor: starts after the group with this `cursor`; empty starts with the first group.

        Raises:
            Unavailable: if the store cannot be reached for 3 minutes.
            MessageTooLarge: if a group has more than 256 MiB; `metadata` has its `group_id`, and the `cursor` after it.
        """
        request = rollout_service_pb2.WatchRolloutsRequest(
            project=self._session.project, training_run=self._session.run(run), cursor=cursor
        )
        async for group in follow_groups(self._services, request):
            yield Group(group)

    async def watch(self, *, run: str | Named | None = None, cursor: str = "") -> AsyncIterator[RolloutChanges]:
        """Yields rollouts whenever they change, in their current state, endlessly and across restarts of the store.

        The first item is empty: no change after it is missed. Several changes within half a second are reported as
        one.

        >>> async for changes in client.rollouts.watch():
        ...     print(changes.rollouts)
        ...     break
        []

        Args:
            run: only rollouts of this training run; None for the whole project.
            cursor: starts after the changes with this `cursor`; empty starts now.

        Raises:
            CursorInvalid: if the cursor belongs to another project or training run.
            Unavailable: if the store cannot be reached for 3 minutes.
        """
        request = rollout_changes_pb2.WatchRolloutChangesRequest(
            project=self._session.project, training_run=self._session.run(run), cursor=cursor
        )
        async for changes in follow_changes(self._services, request):
            yield RolloutChanges(changes)

    async def update(
        self,
        rollout: str | Named,
        *,
        priority: int | None = None,
        deadline: datetime.datetime | None = None,
        no_deadline: bool = False,
    ) -> Rollout:
        """Changes the priority or the deadline of a rollout that is not final; returns the changed rollout.

        Args:
            rollout: its name, its UUID or its record.
            priority: -100 to 100; higher ones run first.
            deadline: time at which it fails unless it has ended; without a zone, local time.
            no_deadline: removes its deadline.

        Raises:
            ArgumentInvalid: if a value is out of range, the deadline has passed, or nothing is to be changed.
            RolloutNotFound: if there is none.
            RolloutStateInvalid: if it is final.
        """
        request = rollout_selection_pb2.UpdateRolloutRequest()
        request.rollout.name = self._session.rollout(rollout)
        if priority is not None:
            request.rollout.priority = priority
            request.update_mask.paths.append("priority")
        if deadline is not None or no_deadline:
            request.update_mask.paths.append("deadline_time")
        if deadline is not None:
            request.rollout.deadline_time.CopyFrom(timestamp(deadline))
        return Rollout((await self._services.rollouts.UpdateRollout(request)).rollout)

    async def cancel(self, rollouts: Iterable[str | Named] = (), *, run: str | Named | None = None) -> int:
        """Cancels rollouts, or all rollouts of a training run; returns how many. Final rollouts are not changed.

        Running rollouts become CANCELLED when their runner has stopped them.
        """
        names = [self._session.rollout(each) for each in rollouts]
        count = 0
        for start in range(0, max(1, len(names)), BATCH_SIZE):
            request = rollout_service_pb2.CancelRolloutsRequest(
                names=names[start : start + BATCH_SIZE], training_run=self._session.run(run)
            )
            answer = await self._services.rollouts.CancelRollouts(request)
            count += answer.cancelled_count + answer.cancelling_count
        return count

    async def retry(self, rollouts: Iterable[str | Named]) -> builtins.list[Rollout]:
        """Creates a copy of each of these final rollouts; returns the copies.

        >>> [again] = await client.rollouts.retry(await client.rollouts.list(states=["succeeded"], limit=1).to_list())
        >>> again.is_final
        False

        Raises:
            RolloutStateInvalid: if one is not final.
        """
        names = [self._session.rollout(each) for each in rollouts]
        copies: list[Rollout] = []
        for start in range(0, len(names), BATCH_SIZE):
            request = rollout_service_pb2.RetryRolloutsRequest(names=names[start : start + BATCH_SIZE])
            answer = await self._services.rollouts.RetryRollouts(request)
            copies += [Rollout(each) for each in answer.rollouts]
        return copies

    async def delete(
        self, rollouts: Iterable[str | Named] = (), *, filter: str = "", run: str | Named | None = None
    ) -> int:
        """Permanently deletes final rollouts with their attempts and spans; returns how many.

        >>> await client.rollouts.wait(await client.rollouts.create("echo", {"input": "bye"}, priority=-7))
        [Rollout(name='projects/default/rollouts/...', state='succeeded', reward=1.0)]
        >>> await client.rollouts.delete(filter="priority = -7")
        1

        Args:
            rollouts: names, UUIDs or records; deleted in batches of 1000, each of which is deleted completely or not
                at all.
            filter: instead of `rollouts`: all that match, as in `list`; `*` for every one. Rollouts are kept while
                another member of their group is not final, or their training run is in progress.
            run: with `filter`: only rollouts of this training run.

        Raises:
            ArgumentInvalid: if neither rollouts nor a filter are given, or both, or the filter is malformed.
            RolloutNotFound: if one does not exist.
            RolloutStateInvalid: if a named rollout must be kept.
        """
        names = [self._session.rollout(each) for each in rollouts]
        count = 0
        for start in range(0, max(1, len(names)), BATCH_SIZE):
            request = rollout_selection_pb2.DeleteRolloutsRequest(
                names=names[start : start + BATCH_SIZE],
                filter=filter,
                project=self._session.project if filter else "",
                training_run=self._session.run(run),
            )
            answer = await self._services.rollouts.DeleteRollouts(request)
            count += answer.deleted_count
            while answer.next_page_token:
                request.page_token = answer.next_page_token
                answer = await self._services.rollouts.DeleteRollouts(request)
                count += answer.deleted_count
        return count

    async def _version(self, agent: str) -> str:
        """Returns the version to pin: the given one, or the latest of the agent."""
        name = agent if agent.startswith("resources/") else f"resources/agent.{agent}"
        if "/versions/" in name:
            return name
        request = resource_service_pb2.GetResourcesRequest(names=[name], project=self._session.project)
        return str((await self._services.resources.GetResources(request)).resources[0].name)


async def read(session: Session, names: Sequence[str]) -> list[Rollout]:
    """Reads rollouts with their attempts, a few concurrently, in the given order."""
    slots = asyncio.Semaphore(READ_AT_ONCE)

    async def one(name: str) -> Rollout:
        async with slots:
            request = rollout_service_pb2.GetRolloutRequest(name=name)
            return Rollout((await session.services.rollouts.GetRollout(request)).rollout)

    return list(await asyncio.gather(*(one(name) for name in names)))
