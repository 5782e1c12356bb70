"""Detects that a run's rewards have collapsed, and records a notice or rolls the run back to its best checkpoint.

Averages over `window` steps are compared, so that one bad step has no effect. What counts as a collapse follows from the
run's own rewards unless `drop` is given: a fall by half of their spread (the largest standard deviation among the
rollouts of a step so far), and by more than chance explains.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Annotated, Literal

from pydantic import Field

from fulmen_algorithm.persistence.checkpoints import Checkpoint
from fulmen_algorithm.runs.progress import Progress
from fulmen_algorithm.training.strict import AUTO_BY_NAME, Strict

REWARD, SPREAD, GROUPS = "reward_mean", "reward_std", "groups"
"""The monitored metric, the standard deviation of the rewards of a step, and the number of groups they are of."""
SHARE_OF_SPREAD = 0.5
STANDARD_ERRORS = 3.0
"""A fall by chance, in standard errors of the difference between two averages, that is not taken for a collapse."""

Drop = Annotated[float | None, AUTO_BY_NAME]


class NoCollapse(Strict):
    """No reaction to a collapse.

    Attributes:
        kind: `none`.
        window: Steps over which a checkpoint's displayed reward is averaged.
    """

    kind: Literal["none"] = "none"
    window: int = Field(default=5, ge=1, le=10_000)


class NoticeCollapse(Strict):
    """Records a notice that the reward has collapsed, and continues training.

    Attributes:
        kind: `notice`.
        window: Steps over which rewards are averaged; monitoring begins after this many.
        drop: Maximum difference between the best average so far and the current one, in units of the reward; `"auto"`
            derives it from the run's rewards.
    """

    kind: Literal["notice"] = "notice"
    window: int = Field(default=5, ge=1, le=10_000)
    drop: Drop = Field(default=None, gt=0)


class RollbackOnCollapse(Strict):
    """Rolls the run back to its best checkpoint when the reward falls.

    Attributes:
        kind: `rollback`.
        window: Steps over which rewards are averaged; monitoring begins after this many.
        drop: See `NoticeCollapse`.
        max_rollbacks: Maximum number of rollbacks; the run fails at the next collapse.
    """

    kind: Literal["rollback"]
    window: int = Field(default=5, ge=1, le=10_000)
    drop: Drop = Field(default=None, gt=0)
    max_rollbacks: int = Field(default=2, ge=1, le=100)


CollapseSettings = Annotated[NoCollapse | NoticeCollapse | RollbackOnCollapse, Field(discriminator="kind")]


class RewardCollapsed(Exception):
    """Raised when a run must resume from an earlier checkpoint; the text is shown to users."""

    def __init__(self, message: str, *, sequence: int, step: int) -> None:
        super().__init__(message)
        self.message = message
        self.sequence = sequence
        self.step = step


def rewarded(progress: Progress, metrics: Mapping[str, float], *, window: int) -> Progress:
    """Returns the progress after a step with a reward."""
    rewards = (*progress.rewards, metrics[REWARD])[-window:]
    best = progress.best_reward
    if len(rewards) == window:
        best = fmean(rewards) if best is None else max(best, fmean(rewards))
    spread = max(progress.reward_spread, metrics.get(SPREAD, 0.0))
    return replace(progress, rewards=rewards, best_reward=best, reward_spread=spread)


def fall(progress: Progress, *, window: int) -> float:
    """Returns by how much the average reward of the last steps is below the best one; 0 before there are enough."""
    if len(progress.rewards) < window or progress.best_reward is None:
        return 0.0
    return progress.best_reward - fmean(progress.rewards)


def allowed_fall(progress: Progress, settings: NoticeCollapse | RollbackOnCollapse, *, groups: float) -> float:
    """Returns the largest fall that is not a collapse.

    Args:
        progress: The progress of the run.
        settings: How the run is monitored.
        groups: Groups per step; rewards within a group count as one, because they depend on the same task.
    """
    if settings.drop is not None:
        return settings.drop
    if not progress.reward_spread:
        return math.inf
    error = math.sqrt(2.0 / (settings.window * max(groups, 1.0)))
    return progress.reward_spread * max(SHARE_OF_SPREAD, STANDARD_ERRORS * error)


def best_of(checkpoints: Sequence[Checkpoint], *, window: int) -> Checkpoint | None:
    """Returns the checkpoint with the best average reward; those with fewer steps than the window come last."""

    def worth(checkpoint: Checkpoint) -> tuple[bool, float, int]:
        rewards = checkpoint.progress.get("rewards") or []
        return len(rewards) == window, fmean(rewards) if rewards else float("-inf"), checkpoint.sequence

    return max(checkpoints, key=worth, default=None)
