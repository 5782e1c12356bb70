"""Hands stored groups to training, as the feed hands over those of a run's own rollouts.

Invariant: the n-th group that a run deals with is a function of the scores, the seed and n alone, and n is its index;
so the indices in a checkpoint say exactly what was trained on. No rollout comes twice in an epoch, and a step never
reaches from one epoch into the next.
"""

from collections.abc import Awaitable, Callable, Sequence

from fulmen_algorithm.rollouts.groups import FinishedGroup, FinishedRollout, train_group_id
from fulmen_algorithm.rollouts.trajectory import RolloutTrajectory
from fulmen_algorithm.runs.algorithm import permutation

Read = Callable[[Sequence[FinishedGroup]], Awaitable[dict[str, RolloutTrajectory]]]


class StoredGroups:
    """Hands stored groups out, in a new order each epoch."""

    def __init__(self, groups: Sequence[tuple[FinishedRollout, ...]], *, seed: int, read: Read) -> None:
        """`read` loads the trajectories of groups."""
        self._groups = groups
        self._seed = seed
        self._read = read
        self._next = 0
        self._end = 0

    def begin_step(self, position: int) -> None:
        """Continues after `consumed` groups; the step ends with their epoch."""
        self._next = position
        self._end = (position // len(self._groups) + 1) * len(self._groups)

    async def poll(self, *, limit: int) -> list[FinishedGroup]:
        """Returns the next groups; none at the end of the epoch."""
        positions = range(self._next, min(self._next + limit, self._end))
        self._next += len(positions)
        return [self._group(position) for position in positions]

    async def trajectories(self, groups: Sequence[FinishedGroup]) -> dict[str, RolloutTrajectory]:
        """Reads the stored trajectories."""
        return await self._read(groups)

    def _group(self, position: int) -> FinishedGroup:
        epoch, offset = divmod(position, len(self._groups))
        order = permutation(len(self._groups), self._seed, epoch)
        # These groups come from no feed, so they have no cursor.
        return FinishedGroup(group_id=train_group_id(position), rollouts=self._groups[order[offset]], cursor="")
