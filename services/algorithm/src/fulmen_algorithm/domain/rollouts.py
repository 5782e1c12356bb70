"""The run's rollouts: submitted by index, delivered whole and once, whatever crashed in between."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence

from fulmen_algorithm.domain.control import RunControl
from fulmen_algorithm.domain.groups import (
    VALIDATION_PREFIX,
    FinishedGroup,
    GroupSpec,
    Mode,
    train_group_id,
    train_index,
    validation_group_id,
)
from fulmen_algorithm.domain.ports import RolloutQueue
from fulmen_algorithm.domain.progress import Progress, Submissions
from fulmen_algorithm.domain.trajectory import RolloutTrajectory

VALIDATION_PRIORITY = 10
"""Validation goes before training, because the trainer waits for it."""


class Rollouts:
    """What an algorithm sees of the store's queue and feed."""

    def __init__(self, *, queue: RolloutQueue, control: RunControl) -> None:
        self._queue = queue
        self._control = control
        self._submissions = Submissions(next_index=0)
        self._delivered: set[int] = set()
        self._train: deque[FinishedGroup] = deque()
        self._validation: dict[str, FinishedGroup] = {}
        self._arrived = asyncio.Event()
        self._feed_error: BaseException | None = None

    async def recover(self, progress: Progress) -> None:
        """Learns what the store knows of this run already."""
        known = await self._queue.known_train_groups(below=progress.consumed.below)
        self._submissions = Submissions.recovered(progress, known)

    @property
    def submitted(self) -> int:
        """Training groups that the store knows."""
        return self._submissions.count

    @property
    def next_index(self) -> int:
        """Index of the training group to submit next."""
        return self._submissions.take()

    @property
    def waiting(self) -> int:
        """Finished training groups that nobody took yet."""
        return len(self._train)

    async def submit(self, task: bytes, *, size: int) -> None:
        """Submits the training group `next_index`."""
        index = self._submissions.take()
        await self._control.unless_stopped(
            self._queue.submit([GroupSpec(group_id=train_group_id(index), task=task, size=size)])
        )
        self._submissions.done(index)

    async def finished(self) -> AsyncIterator[FinishedGroup]:
        """Yields finished training groups in the order of the feed, for ever."""
        while True:
            for group in await self.take(limit=1):
                yield group

    async def take(self, *, limit: int) -> list[FinishedGroup]:
        """Waits for at least one finished training group and returns up to `limit` of them, in the order of the feed.

        Raises:
            Interrupted: if the run was asked to stop.
        """
        while not self._train:
            await self._control.unless_stopped(self._wait())
        self._control.check()
        return [self._train.popleft() for _ in range(min(limit, len(self._train)))]

    async def validate(self, tasks: Sequence[bytes], *, version: int) -> list[FinishedGroup]:
        """Runs every task once in validation mode and returns the finished groups in the order of the tasks.

        Raises:
            Interrupted: if the run was asked to stop; asking again with the same version goes on where it was.
        """
        names = [validation_group_id(version, index) for index in range(len(tasks))]
        groups = [
            GroupSpec(group_id=name, task=task, size=1, mode=Mode.VALIDATION, priority=VALIDATION_PRIORITY)
            for name, task in zip(names, tasks, strict=True)
        ]
        await self._control.unless_stopped(self._queue.submit(groups))
        while not all(name in self._validation for name in names):
            await self._control.unless_stopped(self._wait())
        finished = [self._validation[name] for name in names]
        # A version is measured once; what came before it is of no use any more.
        self._validation = {k: v for k, v in self._validation.items() if k not in set(names)}
        return finished

    async def trajectories(self, groups: Sequence[FinishedGroup]) -> dict[str, RolloutTrajectory]:
        """Reads what the policy did in the successful rollouts of groups, by rollout name."""
        attempts = {r.attempt: r.name for g in groups for r in g.rollouts if r.succeeded and r.attempt}
        found = await self._control.unless_stopped(self._queue.trajectories(list(attempts)))
        return {attempts[attempt]: trajectory for attempt, trajectory in found.items()}

    async def follow(self, progress: Progress) -> None:
        """Follows the feed from the progress' cursor, until cancelled; an error ends it and is raised to the taker."""
        try:
            async for group in self._queue.watch(progress.cursor):
                self._deliver(group, progress)
        except Exception as error:  # noqa: BLE001  (raised again where the run waits)
            self._feed_error = error
            self._wake()

    def _deliver(self, group: FinishedGroup, progress: Progress) -> None:
        index = train_index(group.group_id)
        if index is not None:
            if index in progress.consumed or index in self._delivered:
                return
            self._delivered.add(index)
            self._train.append(group)
        elif group.group_id.startswith(VALIDATION_PREFIX):
            self._validation[group.group_id] = group
        self._wake()

    def _wake(self) -> None:
        arrived, self._arrived = self._arrived, asyncio.Event()
        arrived.set()

    async def _wait(self) -> None:
        if self._feed_error is not None:
            raise self._feed_error
        await self._arrived.wait()
        if self._feed_error is not None:
            raise self._feed_error
