"""Groups of rollouts on their way out to the store and back.

Invariant: the id of a training group is its index, that of a validation group names the policy version that it
measures; so whatever comes back is recognised, also by a service that was restarted.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

TRAIN_PREFIX = "train/"
VALIDATION_PREFIX = "validation/"


class Mode(StrEnum):
    """What a rollout is for."""

    TRAIN = "train"
    VALIDATION = "validation"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSpec:
    """A group to submit.

    Attributes:
        group_id: `train/<index>` or `validation/<version>/<index>`.
        task: The agent's input, JSON, UTF-8.
        size: Number of rollouts.
        mode: Train or validation.
        priority: Higher goes first; -100 to 100.
    """

    group_id: str
    task: bytes
    size: int
    mode: Mode = Mode.TRAIN
    priority: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRollout:
    """A rollout in its final state.

    Attributes:
        name: `rollouts/{uuid}`.
        attempt: Name of the attempt that decided the state; empty if there was none.
        succeeded: Whether the agent ended well.
        reward: The final reward, unitless; None if there is none, which is never taken for zero.
        failure: Why it did not succeed; empty if it did.
        output: What the agent returned, as text for a person.
    """

    name: str
    attempt: str
    succeeded: bool
    reward: float | None
    failure: str = ""
    output: str = ""

    @property
    def scored(self) -> bool:
        """Tells whether the reward says something about the policy."""
        return self.succeeded and self.reward is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedGroup:
    """A group whose members are all final.

    Attributes:
        group_id: As it was submitted.
        rollouts: All members, by name.
        cursor: Continues the feed after this group.
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
    """Takes the index out of a training group's id; None if it is another kind of group."""
    number = group_id.removeprefix(TRAIN_PREFIX)
    return int(number) if number != group_id and number.isdecimal() else None


def validation_group_id(version: int, index: int) -> str:
    """Formats the id of a validation group."""
    return f"{VALIDATION_PREFIX}{version}/{index}"


def rewards_of(group: FinishedGroup) -> Mapping[str, float]:
    """Returns the rewards of the members that have one, by rollout name; failed members are left out."""
    return {r.name: r.reward for r in group.rollouts if r.succeeded and r.reward is not None}
