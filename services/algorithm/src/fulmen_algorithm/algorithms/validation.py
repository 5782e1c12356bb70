"""Measures a policy version on the validation tasks: greedy by the route's overrides, one rollout each."""

import math
from collections import Counter
from collections.abc import Sequence

from fulmen_algorithm.algorithms.monitors import HELP
from fulmen_algorithm.algorithms.scoring import Scorer
from fulmen_algorithm.rollouts.groups import FinishedGroup, FinishedRollout, failed_one
from fulmen_algorithm.runs.context import RunContext
from fulmen_algorithm.runs.failure import RunFailed

SAMPLE = 0
"""Which validation task is shown in the report, before and after."""


class Validator:
    """Validates the present weights of a run."""

    def __init__(self, ctx: RunContext, *, scorer: Scorer | None = None, failure_reward: float = 0.0) -> None:
        """Initializes the validator.

        Args:
            ctx: The run.
            scorer: Computes the total and the parts of a rollout's reward; None for the final reward alone.
            failure_reward: Reward of a rollout that cannot be scored, in the mean of the total and of each part.
        """
        self._ctx = ctx
        self._scorer = scorer
        self._failure_reward = failure_reward

    async def validate(self, *, last: bool) -> dict[str, float]:
        """Runs every validation task once, unless the present step or its version was validated.

        A failed rollout counts as `failure_reward`, so that failures do not raise the accuracy; their number is a
        separate metric.

        Args:
            last: Whether this is the final validation.

        Raises:
            Interrupted: if the run was asked to stop.
        """
        ctx, tasks = self._ctx, self._ctx.inputs.validation_tasks
        if not tasks or ctx.progress.validated_step == ctx.progress.step:
            return {}
        if ctx.policy.has_weights_of(ctx.progress.validated_step):
            return await self._repeated(last=last)
        groups = await ctx.rollouts.validate(tasks, version=ctx.policy.version)
        scores = [self._total(g.rollouts[0]) for g in groups]
        missing = self._failure_reward
        accuracy = sum(missing if score is None else score for score in scores) / len(scores)
        failed = scores.count(None)
        if ctx.progress.step == 0:
            ctx.recorder.result(validation_accuracy_before=accuracy)
            await self._keep_sample("before", groups)
        if last or ctx.recorder.pauses:
            ctx.recorder.result(validation_accuracy_after=accuracy)
            await self._keep_sample("after", groups)
        if accuracy >= ctx.progress.results.get("validation_accuracy_best", -math.inf):
            ctx.recorder.result(validation_accuracy_best=accuracy)
            await ctx.policy.mark_best(accuracy)
        ctx.recorder.result(validation_accuracy=accuracy)
        if last:
            await self._conclude(accuracy)
        ctx.recorder.validated()
        if failed:
            kinds = Counter(
                g.rollouts[0].failure or "NO_REWARD" for g, score in zip(groups, scores, strict=True) if score is None
            )
            causes = ", ".join(f"{kind}: {count}" for kind, count in kinds.most_common(3))
            ctx.notify(
                "warning",
                f"{failed} of {len(groups)} validation rollouts failed ({causes}); they count as {missing:g}."
                f"{failed_one(groups)}",
            )
        parts = [{} if self._scorer is None else self._scorer.parts(g.rollouts[0]) for g in groups]
        # A missing part of a successful rollout is not a failure.
        otherwise = [missing if score is None else 0.0 for score in scores]
        means = {
            f"validation_{name}": sum(part.get(name, none) for part, none in zip(parts, otherwise, strict=True))
            / len(parts)
            for name in sorted({name for part in parts for name in part})
        }
        return {"validation_accuracy": accuracy, "validation_failed": float(failed), **means}

    async def _repeated(self, *, last: bool) -> dict[str, float]:
        """Takes the result of the last validation again: steps since then have changed no weights."""
        accuracy = self._ctx.progress.results["validation_accuracy"]
        if last or self._ctx.recorder.pauses:
            self._ctx.recorder.result(validation_accuracy_after=accuracy)
        if last:
            await self._conclude(accuracy)
        self._ctx.recorder.validated()
        return {"validation_accuracy": accuracy}

    async def _conclude(self, accuracy: float) -> None:
        """Serves the best version, and reports if it is not the last or not better than the first."""
        ctx = self._ctx
        try:
            best = await ctx.policy.serve_best()
        except RunFailed as error:
            # What was trained is not lost with an older version.
            ctx.notify("warning", f"The best validated version cannot be served; the last one is. {error.message}")
            best = None
        if best is not None:
            ctx.notify(
                "warning",
                f"The validation reward of the last version is {accuracy:.4g}, that of step {best.step} was"
                f" {best.validation:.4g}. The version of step {best.step} serves from now on.",
            )
        before = ctx.progress.results.get("validation_accuracy_before")
        if before is not None and ctx.progress.step and ctx.progress.results["validation_accuracy_best"] <= before:
            ctx.notify(
                "warning",
                f"The validation reward did not improve: {before:.4g} at the start, {accuracy:.4g} after"
                f" {ctx.progress.step} steps. {HELP}",
            )

    def _total(self, rollout: FinishedRollout) -> float | None:
        """Returns the reward of a rollout; None if it contains no information about the policy."""
        if self._scorer is not None:
            return self._scorer.total(rollout)
        return rollout.reward if rollout.scored else None

    async def _keep_sample(self, name: str, groups: Sequence[FinishedGroup]) -> None:
        group = groups[SAMPLE]
        rollout = group.rollouts[0]
        trajectory = (await self._ctx.rollouts.trajectories([group])).get(rollout.name)
        self._ctx.recorder.note(
            f"sample_{name}",
            {
                "rollout": rollout.name,
                "task": self._ctx.inputs.validation_tasks[SAMPLE].decode(),
                "prompt": trajectory.prompt_text if trajectory else "",
                "answer": trajectory.answer_text if trajectory else rollout.output,
                "reward": rollout.reward,
                "failure": rollout.failure,
            },
        )
