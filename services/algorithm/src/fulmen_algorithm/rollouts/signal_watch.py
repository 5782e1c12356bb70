"""Watches whether a run has anything to learn from: groups in which one rollout did better than another."""

from collections.abc import Mapping

from fulmen_algorithm.runs.ports import Notify

STEPS = 3
"""Warn after this many initial steps without any difference in rewards."""


class SignalMonitor:
    """Checks the metrics of one run after each step.

    Only until the first step that trained: a policy that has converged also produces no differences.
    """

    def __init__(self, notify: Notify, *, over: bool = False) -> None:
        """`over`: whether the run has trained before, because it resumes from a checkpoint."""
        self._notify = notify
        self._without = 0
        self._over = over

    def check(self, step: int, metrics: Mapping[str, float]) -> None:
        """Warns once if all rollouts of every group so far got the same reward."""
        if self._over:
            return
        if metrics["groups_trained"]:
            self._over = True
            return
        self._without += bool(metrics["groups_no_variance"])
        if self._without == STEPS:
            self._over = True
            self._notify(
                "warning",
                f"Nothing was learned up to step {step}: within every group all rewards are equal"
                f" (mean {metrics['reward_mean']:.4g}). Either the tasks are too hard or too easy for this policy, or the"
                " grader tells no answer from another. Try tasks that it solves now and then, a larger group_size, or"
                " imitation first.",
            )
