"""Monitors whether the engine samples from the distribution that the trainer assumes.

A wrong answer here is quiet everywhere else: a temperature that the engine leaves out, other weights than it was given,
a chat template of another model all train, and train wrongly.
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
