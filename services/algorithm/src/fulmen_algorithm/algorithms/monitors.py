"""Notices about what a run does not learn from: rollouts that are cut off or left out, and groups without a difference."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fulmen_algorithm.rollouts.trajectory import TokenSequence
from fulmen_algorithm.runs.context import OnNoSignal
from fulmen_algorithm.runs.failure import RunFailed
from fulmen_algorithm.runs.ports import Notify
from fulmen_algorithm.runs.progress import Progress
from fulmen_algorithm.training.rows import Row

HELP = "See docs/learning.md, What to look at when a run does not learn."
SHARE_TO_WARN = 0.1
"""Share of the rollouts of which a notice is worth while."""
ROLLOUTS_TO_JUDGE = 16
"""Fewest rollouts of which a share is computed."""
TOKENS_TO_DOUBT = 200
"""Tokens of constrained calls among which one without an alternative is to be expected."""
STEPS_WITHOUT_SIGNAL = 3
"""Warn after this many initial steps without any difference in rewards."""
STEPS_TO_STOP = 10
"""Stop after this many, if the run is to stop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthLimits:
    """Limits of lengths, in tokens.

    Attributes:
        mask_truncated: Whether rollouts with a truncated answer are left out.
        max_tokens: Maximum length of the answer to one model call.
        token_budget: Maximum length of a row.
    """

    mask_truncated: bool
    max_tokens: int
    token_budget: int


class LengthMonitor:
    """Counts rollouts that were cut off or are too long, and reports them if there are many.

    Each cause is reported once, and again only when its share has doubled.
    """

    def __init__(self, limits: LengthLimits, notify: Notify) -> None:
        self._limits = limits
        self._notify = notify
        self._told: dict[str, float] = {}
        self._seen = self._truncated = self._too_long = 0
        self._of_step: tuple[int, int] = (0, 0)

    def count(self, *, truncated: bool, longest_row: int) -> None:
        """Counts a rollout.

        Args:
            truncated: Whether an answer ended at its token limit.
            longest_row: Tokens of its longest row.
        """
        too_long = longest_row > self._limits.token_budget
        self._seen += 1
        self._truncated += truncated
        self._too_long += too_long
        self._of_step = self._of_step[0] + truncated, self._of_step[1] + too_long

    def end_step(self, step: int) -> dict[str, float]:
        """Returns the metrics of a step, and reports large shares."""
        truncated, too_long = self._of_step
        self._of_step = (0, 0)
        if self._seen >= ROLLOUTS_TO_JUDGE:
            self._tell(step, "truncated", self._truncated, self._truncation())
            self._tell(
                step,
                "too_long",
                self._too_long,
                f"have more than the {self._limits.token_budget} tokens of token_budget, and are left out. Raise"
                " token_budget; gradient_checkpointing saves the memory that this takes.",
            )
            self._seen = self._truncated = self._too_long = 0
        return {"rollouts_truncated": float(truncated), "rollouts_too_long": float(too_long)}

    def _truncation(self) -> str:
        cut = f"have an answer that was cut off at max_tokens = {self._limits.max_tokens}, and are"
        if self._limits.mask_truncated:
            return f"{cut} left out (mask_truncated). Raise max_tokens, or set mask_truncated = false."
        return f"{cut} scored as they are. Raise max_tokens if an answer needs more."

    def _tell(self, step: int, cause: str, count: int, text: str) -> None:
        share = count / self._seen
        if share < max(SHARE_TO_WARN, 2 * self._told.get(cause, 0.0)):
            return
        self._told[cause] = share
        self._notify("warning", f"{count} of {self._seen} rollouts ({share:.0%}) up to step {step} {text} {HELP}")


class ConstraintMonitor:
    """Reports once how calls with constrained answers (`response_format` or `tool_choice`) are trained on."""

    def __init__(self, notify: Notify) -> None:
        self._notify = notify
        self._told = self._doubted = False
        self._calls = self._constrained = self._tokens = self._forced = 0

    def count(self, sequences: Sequence[TokenSequence]) -> None:
        """Counts the calls of a rollout."""
        for sequence in sequences:
            constrained = [call for call in sequence.calls if call.constrained]
            self._calls += len(sequence.calls)
            self._constrained += len(constrained)
            self._tokens += sum(call.end - call.start for call in constrained)
            self._forced += sum(sequence.forced)

    def end_step(self, rows: Sequence[Row]) -> dict[str, float]:
        """Returns the metrics of a step's rows, and reports the first constrained calls."""
        if self._constrained and not self._told and self._forced:
            self._told = True
            self._notify(
                "info",
                f"{self._constrained} of {self._calls} model calls were constrained (response_format, tool_choice):"
                f" {self._forced / self._tokens:.0%} of their tokens had no alternative and do not train; the others "
                "are weighted by the probabilities with which the engine sampled them.",
            )
        if self._tokens >= TOKENS_TO_DOUBT and not self._forced and not self._doubted:
            self._doubted = True
            self._notify(
                "warning",
                f"{self._constrained} of {self._calls} model calls were constrained (response_format, tool_choice), but the"
                " engine reports the probabilities of the unconstrained distribution: so training uses other "
                "probabilities than sampling. Start it with `--logprobs-mode processed_logprobs` (docs/engines.md).",
            )
        return {"tokens_forced": float(sum(sum(row.forced) for row in rows))} if self._constrained else {}


class SignalMonitor:
    """Checks after each step that rewards differ within groups.

    Only until the first step that trained: a policy that has converged also produces no differences.
    """

    def __init__(self, notify: Notify, *, on_no_signal: OnNoSignal = "notice", over: bool = False) -> None:
        """Initializes the monitor.

        Args:
            notify: Appends a notice to the run's events.
            on_no_signal: Reaction to a run that has not trained for `STEPS_TO_STOP` steps.
            over: Whether the run has trained before, because it resumes from a checkpoint.
        """
        self._notify = notify
        self._on_no_signal = on_no_signal
        self._without = 0
        self._over = over

    def check(self, step: int, metrics: Mapping[str, float]) -> None:
        """Warns once if all rollouts of every group so far got the same reward.

        Raises:
            RunFailed: if this persists and the run is to stop then.
        """
        if self._over:
            return
        if metrics["groups_trained"]:
            self._over = True
            return
        self._without += bool(metrics["groups_no_variance"])
        text = (
            f"Nothing was learned up to step {step}: within every group all rewards are equal"
            f" (mean {metrics['reward_mean']:.4g}). Either the tasks are too hard or too easy for this policy, or the"
            " grader does not distinguish answers. Try tasks that the policy solves sometimes, a larger group_size, or"
            f" sft first. {HELP}"
        )
        if self._without == STEPS_TO_STOP and self._on_no_signal == "stop":
            raise RunFailed(f'{text} on_no_signal = "notice" continues regardless.')
        if self._without == STEPS_WITHOUT_SIGNAL:
            self._notify("warning", text)


def tell_unchanged(progress: Progress, notify: Notify) -> None:
    """Reports at the end of a run how many of its steps changed no weights."""
    if progress.step and progress.unchanged == progress.step:
        notify(
            "warning",
            f"The run has learned nothing: none of its {progress.step} steps changed the weights, and its policy is "
            f"unchanged. {HELP}",
        )
    elif progress.unchanged:
        notify(
            "info",
            f"{progress.unchanged} of {progress.step} steps changed no weights, and published no version: no group differed"
            " in its rewards, or the optimiser skipped the step.",
        )
