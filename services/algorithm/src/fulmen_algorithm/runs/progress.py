"""The groups that a run has consumed: the part of a checkpoint that makes training exactly-once.

Invariant: a group's index is in `consumed` if and only if the weights in the same checkpoint include it (or it was
already dropped), and the cursor is just after the last of them in the feed. Nothing here changes between commits, so
groups lost in a crash are delivered again.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from fulmen_algorithm.rollouts.groups import REWARD_MODEL, FinishedGroup


class Outcome(StrEnum):
    """Outcome of a finished group."""

    TRAINED = "trained"
    NO_VARIANCE = "no_variance"
    TOO_FEW_USABLE = "too_few_usable"
    TOO_STALE = "too_stale"

    @property
    def dropped(self) -> bool:
        """Whether the group was dropped and must be refilled."""
        return self is not Outcome.TRAINED


@dataclass(frozen=True, slots=True, kw_only=True)
class Consumed:
    """A group consumed by a step.

    Attributes:
        group: The group.
        outcome: Trained on, or the reason why not.
        trained: Names of the rollouts that were trained on.
    """

    group: FinishedGroup
    outcome: Outcome
    trained: tuple[str, ...] = ()

    def record(self, *, branch: int, step: int) -> Mapping[str, object]:
        """Returns the line of `consumed.jsonl`."""
        key = (REWARD_MODEL, None, b"")
        scores = {r.name: r.rewards[key] for r in self.group.rollouts if key in r.rewards}
        return {
            "branch": branch,
            "step": step,
            "group": self.group.index,
            "outcome": self.outcome.value,
            "rollouts": [r.name for r in self.group.rollouts],
            "trained": list(self.trained),
            **({"reward_model": scores} if scores else {}),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexSet:
    """A set of non-negative integers, stored as all below `below` plus those in `above`."""

    below: int = 0
    above: frozenset[int] = frozenset()

    def __contains__(self, index: int) -> bool:
        return index < self.below or index in self.above

    def __len__(self) -> int:
        return self.below + len(self.above)

    def with_all(self, indices: Iterable[int]) -> "IndexSet":
        """Returns the set with further members."""
        above = {i for i in (*self.above, *indices) if i >= self.below}
        below = self.below
        while below in above:
            above.discard(below)
            below += 1
        return IndexSet(below=below, above=frozenset(above))


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The progress of a run as of the last committed step.

    Attributes:
        step: Training steps done.
        cursor: Feed position after the last consumed group; empty at the beginning.
        consumed: Indices of the consumed groups.
        dropped: Number of consumed groups that were dropped.
        unchanged: Number of steps that changed no weights.
        consumed_bytes: Size of `consumed.jsonl`.
        branch: Number of rollbacks so far.
        parent_version: Version of the weights in the same checkpoint, or the version they were trained from; 0 if none.
        policy_version: Version of the weights in the same checkpoint; 0 if not published.
        validated_step: Last validated step; -1 before the first validation.
        ended: Whether the last step has ended, with all that is measured after it; a run that stops in between has not.
        rewards: Mean rewards of the last steps, as many as are averaged.
        best_reward: Best of these averages so far; None before the first.
        reward_spread: Largest standard deviation among the rewards of one step so far.
        collapsed: Whether the reward has collapsed, and has not recovered.
        results: Metrics of the run.
        spent_s: Wall time by activity, in seconds.
        memory: State of the algorithm itself, as JSON.
    """

    step: int = 0
    cursor: str = ""
    consumed: IndexSet = field(default_factory=IndexSet)
    dropped: int = 0
    unchanged: int = 0
    consumed_bytes: int = 0
    branch: int = 0
    parent_version: int = 0
    policy_version: int = 0
    validated_step: int = -1
    ended: bool = True
    rewards: tuple[float, ...] = ()
    best_reward: float | None = None
    reward_spread: float = 0.0
    collapsed: bool = False
    results: Mapping[str, float] = field(default_factory=dict)
    spent_s: Mapping[str, float] = field(default_factory=dict)
    memory: Mapping[str, Any] = field(default_factory=dict)


def committed(
    progress: Progress, *, step: int, consumed: Sequence[Consumed], consumed_bytes: int, changed: bool = True
) -> Progress:
    """Returns the progress after a step that consumed groups, in feed order; weights that it changed are not published yet.

    Raises:
        ValueError: if a group was already consumed.
    """
    indices = [c.group.index for c in consumed]
    if repeated := [i for i in indices if i in progress.consumed] or len(set(indices)) < len(indices):
        raise ValueError(f"Groups were consumed before: {repeated}.")
    return replace(
        progress,
        step=step,
        ended=False,
        cursor=consumed[-1].group.cursor if consumed else progress.cursor,
        consumed=progress.consumed.with_all(indices),
        dropped=progress.dropped + sum(c.outcome.dropped for c in consumed),
        consumed_bytes=consumed_bytes,
        unchanged=progress.unchanged + (not changed),
        policy_version=0 if changed else progress.policy_version,
    )


@dataclass(slots=True, kw_only=True)
class Submissions:
    """The training groups submitted to the store.

    Groups are submitted in index order. Groups submitted by an earlier process after its last checkpoint stay in
    `ahead` until their index is reached, and are not submitted again.
    """

    next_index: int
    ahead: set[int] = field(default_factory=set)

    @classmethod
    def recovered(cls, progress: Progress, known: Iterable[int]) -> "Submissions":
        """Builds the state at startup from the checkpoint and the indices listed by the store."""
        submissions = cls(next_index=progress.consumed.below, ahead={*known, *progress.consumed.above})
        submissions._advance()
        return submissions

    @property
    def count(self) -> int:
        """Number of training groups at the store."""
        return self.next_index + len(self.ahead)

    def upcoming(self, count: int) -> list[int]:
        """Returns the indices of the next `count` groups that the store does not have, in order."""
        missing = (index for index in itertools.count(self.next_index) if index not in self.ahead)
        return list(itertools.islice(missing, count))

    def done(self, indices: Iterable[int]) -> None:
        """Records that the store has the groups."""
        self.ahead.update(indices)
        self._advance()

    def _advance(self) -> None:
        self.ahead = {i for i in self.ahead if i >= self.next_index}
        while self.next_index in self.ahead:
            self.ahead.discard(self.next_index)
            self.next_index += 1
