"""Rollouts: create, wait, list, count, stream, watch, update, cancel, retry, delete. Made by tools/sync_client.py of `fulmen.client.aio.rollouts`."""

from __future__ import annotations

import builtins
import datetime
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from fulmen.client.aio.rollouts import AsyncRolloutQuery, AsyncRollouts
from fulmen.client.face import Face, faced
from fulmen.client.rollouts import Attempt, Group, Rollout, RolloutChanges, RolloutCount
from fulmen.client.view import Named
from fulmen.training.tasks import Tasks

__all__ = ["RolloutQuery", "Rollouts"]


class RolloutQuery(Face):
    """Rollouts that a filter selects, newest first; read when they are iterated over."""

    _wraps = AsyncRolloutQuery
    _aio: AsyncRolloutQuery

    def __iter__(self) -> Iterator[Rollout]:
        """Iterates over the rollouts.

        Raises:
            ArgumentInvalid: if the filter is malformed.
        """
        return self._iterate(self._aio.__aiter__())

    def to_list(self) -> list[Rollout]:
        """Returns all of them."""
        return self._call(self._aio.to_list())

    def to_pandas(self) -> Any:
        """Returns a `pandas.DataFrame` with one row per rollout.

        Its columns: rollout, state, failure, mode, group, training_run, reward, attempts (count), duration_s (of the
        deciding attempt, seconds), task, output, failure_message, created and ended (UTC).

        Raises:
            ExtraMissing: if pandas is not installed.
        """
        return self._call(self._aio.to_pandas())

    @property
    def aio(self) -> AsyncRolloutQuery:
        """The same, asynchronous, over the same connection."""
        return self._aio


class Rollouts(Face):
    """The queue of rollouts."""

    _wraps = AsyncRollouts
    _aio: AsyncRollouts

    def create(
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

        >>> rollouts = client.rollouts.create("echo", [{"input": "one"}, {"input": "two"}])
        >>> [rollout.state for rollout in rollouts]
        ['queued', 'queued']

        Args:
            agent: name of a published agent, of which the latest version is meant, or a version of it.
            tasks: one task or several, as in `client.train`.
            mode: `train`, `validation` or `test`.
            group_id: id of the group that all of them form; empty if each is alone.
            priority: -100 to 100; higher ones run first.
            timeout_s: limit of one attempt, seconds; None for 15 minutes.

        Raises:
            ResourceNotFound: if there is no such agent.
            QuotaExceeded: if the project's quota of queued rollouts is used up.
            ConfigError: if a task is malformed; lists all problems.
        """
        return self._call(
            self._aio.create(agent, tasks, mode=mode, group_id=group_id, priority=priority, timeout_s=timeout_s)
        )

    def get(self, rollout: str | Named, *, printed: bool = False) -> Rollout:
        """Returns a rollout with its latest attempts.

        Args:
            rollout: its name, its UUID or its record.
            printed: whether to read the end of what each attempt printed, too.

        Raises:
            RolloutNotFound: if there is none.
        """
        return self._call(self._aio.get(rollout, printed=printed))

    def attempts(self, rollout: str | Named) -> Iterator[Attempt]:
        """Yields all ended attempts of a rollout, oldest first; the rollout itself has the latest 16.

        >>> [done] = client.rollouts.wait(client.rollouts.create("echo", {"input": "hello"}))
        >>> [attempt.state for attempt in client.rollouts.attempts(done)]
        ['succeeded']

        Args:
            rollout: its name, its UUID or its record.

        Raises:
            RolloutNotFound: if there is none.
        """
        return self._iterate(self._aio.attempts(rollout))

    def list(
        self,
        *,
        run: str | Named | None = None,
        states: Sequence[str] = (),
        filter: str = "",
        limit: int | None = None,
        details: bool = True,
    ) -> RolloutQuery:
        """Selects rollouts, newest first.

        >>> client.rollouts.wait(client.rollouts.create("echo", {"input": "hello"}))
        [Rollout(name='projects/default/rollouts/...', state='succeeded', reward=1.0)]
        >>> newest = client.rollouts.list(states=["succeeded"], filter="mode = TEST", limit=1).to_list()
        >>> [rollout.reward for rollout in newest]
        [1.0]

        Args:
            run: only those of this training run.
            states: only those in these states, such as `succeeded`.
            filter: only those that match, in the grammar of AIP-160, such as `mode = VALIDATION AND priority >= 1`.
            limit: maximum number; None for all.
            details: whether to read tasks, attempts and rewards, a call for each; lists leave them out.
        """
        return faced(self._aio.list(run=run, states=states, filter=filter, limit=limit, details=details))

    def count(
        self,
        *,
        run: str | Named | None = None,
        states: Sequence[str] = (),
        filter: str = "",
        facets: Sequence[str] = (),
    ) -> RolloutCount:
        """Counts rollouts, in two seconds at most.

        >>> client.rollouts.wait(client.rollouts.create("echo", {"input": "hello"}))
        [Rollout(name='projects/default/rollouts/...', state='succeeded', reward=1.0)]
        >>> found = client.rollouts.count(filter="reward = 1")
        >>> found.count == found.states["succeeded"], found.has_more
        (True, False)
        >>> found = client.rollouts.count(filter="reward = 1", facets=["reward", "agent"])
        >>> found.facets["reward"] == {"1": found.count}
        True

        Args:
            run: only those of this training run.
            states: only those in these states.
            filter: only those that match, as in `list`.
            facets: fields of which the values are counted: `state`, `failure_kind`, `mode`, `task_type`, `agent`,
                `training_run`, `reward` (in ranges), `resource_versions`, `required_labels` and `metadata`.

        Raises:
            ArgumentInvalid: if the filter is malformed.
        """
        return self._call(self._aio.count(run=run, states=states, filter=filter, facets=facets))

    def wait(
        self, rollouts: str | Named | Iterable[str | Named], *, timeout_s: float | None = None
    ) -> builtins.list[Rollout]:
        """Waits until rollouts are final; returns them with their attempts, in the given order.

        >>> [done] = client.rollouts.wait(client.rollouts.create("echo", {"input": "hello"}))
        >>> done.state, done.output, done.reward
        ('succeeded', 'hello', 1.0)

        Args:
            rollouts: names, UUIDs or records.
            timeout_s: seconds after which to give up; None for never.

        Raises:
            TimeoutError: if they are not final in time; they continue.
            RolloutNotFound: if one does not exist.
        """
        return self._call(self._aio.wait(rollouts, timeout_s=timeout_s))

    def stream(self, *, run: str | Named | None = None, cursor: str = "") -> Iterator[Group]:
        """Yields groups of rollouts as they finish, without end; over restarts of the store.

        >>> for group in client.rollouts.stream():
        ...     print(group.rollouts[0].state)
        ...     break
        succeeded

        Args:
            run: only those of this training run; None for those of the whole project.
            cursor: begins after the group with this `cursor`; empty begins with the first one.

        Raises:
            Unavailable: if the store cannot be reached for 3 minutes.
            MessageTooLarge: if a group has more than 256 MiB; `metadata` has its `group_id`, and the `cursor` behind it.
        """
        return self._iterate(self._aio.stream(run=run, cursor=cursor))

    def watch(self, *, run: str | Named | None = None, cursor: str = "") -> Iterator[RolloutChanges]:
        """Yields rollouts that change, as they are then, without end; over restarts of the store.

        The first one is empty: from there on, nothing is missed. Several changes within half a second are one.

        >>> for changes in client.rollouts.watch():
        ...     print(changes.rollouts)
        ...     break
        []

        Args:
            run: only those of this training run; None for those of the whole project.
            cursor: begins after the changes with this `cursor`; empty begins now.

        Raises:
            CursorInvalid: if the cursor is of another project or training run.
            Unavailable: if the store cannot be reached for 3 minutes.
        """
        return self._iterate(self._aio.watch(run=run, cursor=cursor))

    def update(
        self,
        rollout: str | Named,
        *,
        priority: int | None = None,
        deadline: datetime.datetime | None = None,
        no_deadline: bool = False,
    ) -> Rollout:
        """Changes a rollout that is not final; what is not given stays as it is. Returns it as changed.

        Args:
            rollout: its name, its UUID or its record.
            priority: -100 to 100; higher ones run first.
            deadline: when it fails unless it has ended; without a zone, local time.
            no_deadline: removes its deadline.

        Raises:
            ArgumentInvalid: if a value is out of range, the deadline has passed, or nothing is to be changed.
            RolloutNotFound: if there is none.
            RolloutStateInvalid: if it is final.
        """
        return self._call(self._aio.update(rollout, priority=priority, deadline=deadline, no_deadline=no_deadline))

    def cancel(self, rollouts: Iterable[str | Named] = (), *, run: str | Named | None = None) -> int:
        """Cancels rollouts, or all of a training run; returns how many. Final ones are left alone.

        Running ones are cancelled when their runner has stopped them.
        """
        return self._call(self._aio.cancel(rollouts, run=run))

    def retry(self, rollouts: Iterable[str | Named]) -> builtins.list[Rollout]:
        """Creates a copy of each of these final rollouts; returns the copies.

        >>> [again] = client.rollouts.retry(client.rollouts.list(states=["succeeded"], limit=1).to_list())
        >>> again.is_final
        False

        Raises:
            RolloutStateInvalid: if one is not final.
        """
        return self._call(self._aio.retry(rollouts))

    def delete(self, rollouts: Iterable[str | Named] = (), *, filter: str = "", run: str | Named | None = None) -> int:
        """Deletes final rollouts with their attempts and spans, for good; returns how many.

        >>> client.rollouts.wait(client.rollouts.create("echo", {"input": "bye"}, priority=-7))
        [Rollout(name='projects/default/rollouts/...', state='succeeded', reward=1.0)]
        >>> client.rollouts.delete(filter="priority = -7")
        1

        Args:
            rollouts: names, UUIDs or records; of 1000 at a time, all are deleted or none.
            filter: instead of `rollouts`: all that match, as in `list`; `*` for every one. Those that have to be kept are
                left out: another member of their group is not final, or their training run is under way.
            run: with `filter`: only those of this training run.

        Raises:
            ArgumentInvalid: if neither rollouts nor a filter are given, or both, or the filter is malformed.
            RolloutNotFound: if one does not exist.
            RolloutStateInvalid: if a named one has to be kept.
        """
        return self._call(self._aio.delete(rollouts, filter=filter, run=run))

    @property
    def aio(self) -> AsyncRollouts:
        """The same, asynchronous, over the same connection."""
        return self._aio
