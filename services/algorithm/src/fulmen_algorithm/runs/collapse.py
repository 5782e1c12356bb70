"""Monitors a run's rewards and rolls it back to its best checkpoint if they fall far below their best.

Averages over `window` steps are compared, so that one bad step has no effect. The threshold is in units of the reward,
which only the grader's author knows; so monitoring is off by default.
"""

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import Annotated, Literal

from pydantic import Field

from fulmen_algorithm.runs.progress import Progress
from fulmen_algorithm.training.checkpoints import Checkpoint
from fulmen_algorithm.training.strict import Strict

REWARD = "reward_mean"
"""The monitored metric."""


class NoCollapse(Strict):
    """No reaction to a collapse.

    Attributes:
        kind: `none`.
        window: Steps over which a checkpoint's displayed reward is averaged.
    """

    kind: Literal["none"] = "none"
    window: int = Field(default=20, ge=1, le=10_000)


class RollbackOnCollapse(Strict):
    """Rolls the run back to its best checkpoint when the reward falls.

    Attributes:
        kind: `rollback`.
        window: Steps over which rewards are averaged; monitoring begins after this many.
        drop: Maximum difference between the best average so far and the present one, in units of the reward.
        max_rollbacks: Maximum number of rollbacks; the run fails at the next collapse.
    """

    kind: Literal["rollback"]
    window: int = Field(default=20, ge=1, le=10_000)
    drop: float = Field(gt=0)
    max_rollbacks: int = Field(default=2, ge=1, le=100)


CollapseSettings = Annotated[NoCollapse | RollbackOnCollapse, Field(discriminator="kind")]


class RewardCollapsed(Exception):
    """Raised when a run must resume from an earlier checkpoint; the text is shown to users."""

    def __init__(self, message: str, *, sequence: int, step: int) -> None:
        super().__init__(message)
        self.message = message
        self.sequence = sequence
        self.step = step


def rewarded(progress: Progress, reward: float, *, window: int) -> Progress:
    """Returns the progress after a step with a reward."""
    rewards = (*progress.rewards, reward)[-window:]
    best = progress.best_reward
    if len(rewards) == window:
        best = fmean(rewards) if best is None else max(best, fmean(rewards))
    return replace(progress, rewards=rewards, best_reward=best)


def collapsed(progress: Progress, settings: RollbackOnCollapse) -> bool:
    """Returns whether the average reward of the last steps is too far below the best one."""
    full = len(progress.rewards) == settings.window and progress.best_reward is not None
    return full and fmean(progress.rewards) < (progress.best_reward or 0.0) - settings.drop


def best_of(checkpoints: Sequence[Checkpoint], *, window: int) -> Checkpoint | None:
    """Returns the checkpoint with the best average reward; those with fewer steps than the window come last."""

    def worth(checkpoint: Checkpoint) -> tuple[bool, float, int]:
        rewards = checkpoint.progress.get("rewards") or []
        return len(rewards) == window, fmean(rewards) if rewards else float("-inf"), checkpoint.sequence

    return max(checkpoints, key=worth, default=None)
