"""The run's rollouts: submitted by index, and delivered as whole groups exactly once despite crashes."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

from fulmen_algorithm.rollouts.groups import (
    TRAIN_PREFIX,
    FinishedGroup,
    GroupSpec,
    Mode,
    in_branch,
    of_branch,
    stored_train_index,
    train_group_id,
    train_index,
    validation_group_id,
)
from fulmen_algorithm.rollouts.trajectory import RolloutTrajectory
from fulmen_algorithm.runs.control import RunControl
from fulmen_algorithm.runs.ports import RolloutQueue
from fulmen_algorithm.runs.progress import Progress, Submissions

VALIDATION_PRIORITY = 10
"""Validation precedes training, because the trainer waits for it."""


class Rollouts:
    """The run's view of the store's queue and completion feed."""

    def __init__(self, *, queue: RolloutQueue, control: RunControl) -> None:
        self._queue = queue
        self._control = control
        self._branch = 0
        self._submissions = Submissions(next_index=0)
        self._delivered: set[int] = set()
        self._train: deque[FinishedGroup] = deque()
        self._measured: dict[str, FinishedGroup] = {}
        self._arrived = asyncio.Event()
        self._feed_error: BaseException | None = None

    async def recover(self, progress: Progress) -> None:
        """Loads the state of this run at the store."""
        self._branch = progress.branch
        known = await self._queue.known_train_groups(below=progress.consumed.below, branch=progress.branch)
        self._submissions = Submissions.recovered(progress, known)

    @property
    def submitted(self) -> int:
        """Number of training groups at the store."""
        return self._submissions.count

    @property
    def next_index(self) -> int:
        """Index of the training group to submit next."""
        return self._submissions.next_index

    @property
    def waiting(self) -> int:
        """Finished training groups not yet polled."""
        return len(self._train)

    def upcoming(self, count: int) -> list[int]:
        """Returns the indices of the next `count` training groups to submit, in order."""
        return self._submissions.upcoming(count)

    async def submit(self, *tasks: bytes, size: int) -> None:
        """Submits the training groups `upcoming(len(tasks))`, one for each task, in this order.

        Raises:
            Interrupted: if the run was asked to stop; the store has the first ones, or none, or all.
        """
        indices = self._submissions.upcoming(len(tasks))
        groups = [
            GroupSpec(group_id=train_group_id(index), task=task, size=size)
            for index, task in zip(indices, tasks, strict=True)
        ]
        await self._control.unless_stopped(self._queue.submit(self._stored(groups)))
        self._submissions.done(indices)

    async def finished(self) -> AsyncIterator[FinishedGroup]:
        """Yields finished training groups in feed order, indefinitely."""
        while True:
            for group in await self.poll(limit=1):
                yield group

    async def poll(self, *, limit: int) -> list[FinishedGroup]:
        """Waits for at least one finished training group and returns up to `limit` of them, in feed order.

        Raises:
            Interrupted: if the run was asked to stop.
        """
        while not self._train:
            await self._control.unless_stopped(self._wait(self._arrived))
        self._control.check()
        return [self._train.popleft() for _ in range(min(limit, len(self._train)))]

    async def validate(self, tasks: Sequence[bytes], *, version: int) -> list[FinishedGroup]:
        """Runs every task once in validation mode and returns the finished groups in task order.

        Raises:
            Interrupted: if the run was asked to stop; a repeated call with the same version resumes.
        """
        names = [validation_group_id(version, index) for index in range(len(tasks))]
        groups = [
            GroupSpec(group_id=name, task=task, size=1, mode=Mode.VALIDATION, priority=VALIDATION_PRIORITY)
            for name, task in zip(names, tasks, strict=True)
        ]
        return await self.run_groups(groups)

    async def run_groups(self, groups: Sequence[GroupSpec]) -> list[FinishedGroup]:
        """Runs groups other than training groups and returns them finished, in the given order.

        Raises:
            Interrupted: if the run was asked to stop; a repeated call with the same groups resumes.
        """
        finished = {group.group_id: group async for group in self.stream(groups)}
        return [finished[group.group_id] for group in groups]

    async def stream(self, groups: Sequence[GroupSpec]) -> AsyncIterator[FinishedGroup]:
        """Yields the groups of `run_groups`, each as soon as it has finished.

        Each group is yielded once; after a restart, call it again with the remaining groups.

        Raises:
            ValueError: if a group has the id of a training group.
            Interrupted: if the run was asked to stop.
        """
        if trains := [g.group_id for g in groups if g.group_id.startswith(TRAIN_PREFIX)]:
            raise ValueError(f"Training groups go through `submit`: {trains[0]!r}.")
        missing = dict.fromkeys(g.group_id for g in groups)
        await self._control.unless_stopped(self._queue.submit(self._stored(groups)))
        while missing:
            # Read before the check, so that a group delivered in between ends the wait.
            arrived = self._arrived
            ready = [name for name in missing if name in self._measured]
            if not ready:
                await self._control.unless_stopped(self._wait(arrived))
            self._control.check()
            for name in ready:
                del missing[name]
                yield self._measured.pop(name)

    async def trajectories(self, groups: Sequence[FinishedGroup]) -> dict[str, RolloutTrajectory]:
        """Reads the trajectories of the successful rollouts of groups, by rollout name."""
        attempts = {r.attempt: r.name for g in groups for r in g.rollouts if r.succeeded and r.attempt}
        found = await self._control.unless_stopped(self._queue.trajectories(list(attempts)))
        return {attempts[attempt]: trajectory for attempt, trajectory in found.items()}

    async def of_run(self, training_run: str) -> list[FinishedGroup]:
        """Reads the finished training groups of another run, of all its branches, in order.

        Their ids are those at the store.

        Raises:
            Interrupted: if the run was asked to stop.
        """
        found = await self._control.unless_stopped(self._queue.finished_of(training_run))
        return [group for group in found if stored_train_index(group.group_id) is not None]

    async def follow(self, progress: Progress) -> None:
        """Follows the feed from the progress' cursor until cancelled; an error is raised to the consumer."""
        try:
            async for group in self._queue.watch(progress.cursor):
                plain_id = of_branch(group.group_id, self._branch)
                if plain_id is not None:
                    self._deliver(replace(group, group_id=plain_id), progress)
        except Exception as error:  # noqa: BLE001  (raised again where the run waits)
            self._feed_error = error
            self._wake()

    def _stored(self, groups: Sequence[GroupSpec]) -> list[GroupSpec]:
        """Returns groups with their ids at the store."""
        return [replace(group, group_id=in_branch(group.group_id, self._branch)) for group in groups]

    def _deliver(self, group: FinishedGroup, progress: Progress) -> None:
        index = train_index(group.group_id)
        if index is not None:
            if index in progress.consumed or index in self._delivered:
                return
            self._delivered.add(index)
            self._train.append(group)
        else:
            self._measured[group.group_id] = group
        self._wake()

    def _wake(self) -> None:
        arrived, self._arrived = self._arrived, asyncio.Event()
        arrived.set()

    async def _wait(self, arrived: asyncio.Event) -> None:
        if self._feed_error is not None:
            raise self._feed_error
        await arrived.wait()
        if self._feed_error is not None:
            raise self._feed_error
