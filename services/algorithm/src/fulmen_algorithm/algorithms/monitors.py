"""Monitors of a run's metrics: rewards without differences, and an engine that samples another distribution.

A wrong engine goes unnoticed everywhere else: a temperature that it ignores, other weights than it was given, or the chat
template of another model all train, and train wrongly.
"""

from collections.abc import Mapping

from fulmen_algorithm.policy.engine_settings import MismatchSettings
from fulmen_algorithm.runs.failure import RunFailed
from fulmen_algorithm.runs.ports import Notify


class MismatchMonitor:
    """Checks the metrics of one run after each step."""

    def __init__(self, check: MismatchSettings, notify: Notify) -> None:
        self._check = check
        self._notify = notify
        self._told: int | None = None

    def check(self, step: int, metrics: Mapping[str, float]) -> None:
        """Warns about a mismatch above the threshold, at most once every `every` steps.

        Raises:
            RunFailed: if it is larger than the run allows.
        """
        kl = metrics.get("engine_mismatch_kl")
        if kl is None or kl <= self._check.warn:
            return
        text = (
            f"Engine and trainer disagree in step {step}: KL {kl:.4g} nats per token, mean |difference|"
            f" {metrics['engine_mismatch_logprob_mean']:.4g}, largest {metrics['engine_mismatch_logprob_max']:.4g},"
            f" over {metrics['engine_mismatch_tokens']:.0f} tokens of the same weights."
        )
        if self._check.stop is not None and kl > self._check.stop:
            raise RunFailed(f"{text} engine_mismatch.stop is {self._check.stop:g}.")
        if self._told is None or step - self._told >= self._check.every:
            self._told = step
            self._notify("warning", f"{text} Does it use this temperature, these weights, this template?")


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
