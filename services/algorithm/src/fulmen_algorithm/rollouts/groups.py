"""Groups of rollouts, as submitted and as finished, and their ids.

Invariant: the id of a training group is its index; the id of any other group names its purpose (a validation group
the policy version); so finished groups are recognised even after a restart.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from fulmen.agent import FINAL_DIMENSION, RewardKey

TRAIN_PREFIX = "train/"
VALIDATION_PREFIX = "validation/"
BRANCH_PREFIX = "branch-"
"""After a rollback, a run submits groups under new ids, so that groups of the abandoned branch are ignored."""
REWARD_MODEL = "reward_model"
"""Dimension of the reward that holds the score of a reward model."""
INFRASTRUCTURE = frozenset({"INFRA", "LEASE_LOST", "RUNNER_LOST"})
"""Failures that contain no information about the policy."""


class Mode(StrEnum):
    """Purpose of a rollout."""

    TRAIN = "train"
    VALIDATION = "validation"
    TEST = "test"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSpec:
    """A group to submit.

    Attributes:
        group_id: `train/<index>`, `validation/<version>/<index>`, or an id chosen by the algorithm.
        task: The agent's input, JSON, UTF-8.
        size: Number of rollouts.
        mode: Train, validation or test.
        priority: Higher values are first; -100 to 100.
        resource_versions: Pinned versions for these rollouts, by the agent's name for them; they
            add to the run's and override them.
    """

    group_id: str
    task: bytes
    size: int
    mode: Mode = Mode.TRAIN
    priority: int = 0
    resource_versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRollout:
    """A rollout in its final state.

    Attributes:
        name: `projects/{project}/rollouts/{uuid}`.
        attempt: Name of the deciding attempt; empty if none.
        succeeded: Whether the agent succeeded.
        reward: Final reward, unitless; None if missing, never treated as zero.
        rewards: All rewards by dimension, step and span; empty if there is only the final reward.
        failure: Reason of the failure; empty on success.
        output: Text of the agent's result, for display.
        task: The agent's input, as submitted; empty if it is not known.
    """

    name: str
    attempt: str
    succeeded: bool
    reward: float | None
    failure: str = ""
    output: str = ""
    rewards: Mapping[RewardKey, float] = field(default_factory=dict)
    task: bytes = b""

    @property
    def all_rewards(self) -> Mapping[RewardKey, float]:
        """All rewards by dimension, step and span."""
        if self.rewards or self.reward is None:
            return self.rewards
        return {(FINAL_DIMENSION, None, b""): self.reward}

    @property
    def scored(self) -> bool:
        """Whether the reward is evidence about the policy."""
        return self.succeeded and self.reward is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedGroup:
    """A group whose members are all final.

    Attributes:
        group_id: Id as submitted.
        rollouts: All members, by name.
        cursor: Feed position after this group.
    """

    group_id: str
    rollouts: tuple[FinishedRollout, ...]
    cursor: str

    @property
    def index(self) -> int:
        """Index of a training group.

        Raises:
            ValueError: if it is not a training group.
        """
        index = train_index(self.group_id)
        if index is None:
            raise ValueError(f"{self.group_id!r} is not a training group.")
        return index


def train_group_id(index: int) -> str:
    """Formats the id of a training group."""
    return f"{TRAIN_PREFIX}{index}"


def train_index(group_id: str) -> int | None:
    """Parses the index from a training group's id; None for other groups."""
    number = group_id.removeprefix(TRAIN_PREFIX)
    return int(number) if number != group_id and number.isdecimal() else None


def in_branch(group_id: str, branch: int) -> str:
    """Formats the id of a branch's group at the store; in the first branch it is the plain id."""
    return f"{BRANCH_PREFIX}{branch}/{group_id}" if branch else group_id


def of_branch(stored_id: str, branch: int) -> str | None:
    """Parses the plain id from an id at the store; None for a group of another branch."""
    own, plain_id = _branch_and_plain(stored_id)
    return plain_id if own == branch else None


def stored_train_index(stored_id: str) -> int | None:
    """Parses the index from a training group's id at the store, of any branch; None for other groups."""
    return train_index(_branch_and_plain(stored_id)[1])


def _branch_and_plain(stored_id: str) -> tuple[int, str]:
    first, _, rest = stored_id.partition("/")
    number = first.removeprefix(BRANCH_PREFIX)
    return (int(number), rest) if rest and number != first and number.isdecimal() else (0, stored_id)


def validation_group_id(version: int, index: int) -> str:
    """Formats the id of a validation group."""
    return f"{VALIDATION_PREFIX}{version}/{index}"


def rewards_of(group: FinishedGroup) -> Mapping[str, float]:
    """Returns the rewards by rollout name, without failed members and those without a reward."""
    return {r.name: r.reward for r in group.rollouts if r.succeeded and r.reward is not None}


def failed_one(groups: Iterable[FinishedGroup]) -> str:
    """Returns a hint to append to a message: the command to show a failed rollout; empty if none failed."""
    name = next((rollout.name for group in groups for rollout in group.rollouts if rollout.failure), "")
    return f" See why: `fulmen rollout show {name}`." if name else ""
