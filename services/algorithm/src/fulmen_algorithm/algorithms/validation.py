"""Measures a policy version on the validation tasks: greedy by the route's overrides, one rollout each."""

import math
from collections.abc import Callable, Mapping, Sequence

from fulmen_algorithm.rollouts.groups import FinishedGroup, FinishedRollout
from fulmen_algorithm.runs.context import RunContext

SAMPLE = 0
"""Which validation task is shown in the report, before and after."""


def own_reward(rollout: FinishedRollout) -> float | None:
    """Returns the final reward; None if it is no evidence about the policy."""
    return rollout.reward if rollout.scored else None


def no_parts(_: FinishedRollout) -> Mapping[str, float]:
    """Returns no parts: there is a single reward."""
    return {}


class Validator:
    """Validates the present weights of a run."""

    def __init__(
        self,
        ctx: RunContext,
        *,
        score: Callable[[FinishedRollout], float | None] = own_reward,
        parts: Callable[[FinishedRollout], Mapping[str, float]] = no_parts,
        failure_reward: float = 0.0,
    ) -> None:
        """Runs the validation tasks and returns their metrics.

        Args:
            ctx: The run.
            score: Gives a rollout the number that is averaged, and None to one that cannot be scored.
            parts: Gives it further numbers by name, each of which is averaged likewise.
            failure_reward: Reward of a rollout that cannot be scored, in each of these means.
        """
        self._ctx = ctx
        self._score = score
        self._parts = parts
        self._failure_reward = failure_reward

    async def validate(self, *, last: bool) -> dict[str, float]:
        """Runs every validation task once, unless the present step was validated.

        A rollout that failed counts `failure_reward` here, because an accuracy must not rise by failures; their number
        is a separate metric.

        Args:
            last: Whether this is the validation at the end.

        Raises:
            Interrupted: if the run was asked to stop.
        """
        ctx, tasks = self._ctx, self._ctx.inputs.validation_tasks
        if not tasks or ctx.progress.validated_step == ctx.progress.step:
            return {}
        groups = await ctx.rollouts.validate(tasks, version=ctx.policy.version)
        scores = [self._score(g.rollouts[0]) for g in groups]
        missing = self._failure_reward
        accuracy = sum(missing if score is None else score for score in scores) / len(scores)
        failed = scores.count(None)
        if ctx.progress.step == 0:
            ctx.recorder.result(validation_accuracy_before=accuracy)
            await self._keep_sample("before", groups)
        if last:
            ctx.recorder.result(validation_accuracy_after=accuracy)
            await self._keep_sample("after", groups)
        if accuracy >= ctx.progress.results.get("validation_accuracy_best", -math.inf):
            ctx.recorder.result(validation_accuracy_best=accuracy)
            await ctx.policy.mark_best()
        ctx.recorder.result(validation_accuracy=accuracy)
        ctx.recorder.validated()
        if failed:
            ctx.notify("warning", f"{failed} of {len(groups)} validation rollouts failed; they count as {missing:g}.")
        parts = [self._parts(g.rollouts[0]) for g in groups]
        # A missing part of a successful rollout is no failure.
        otherwise = [missing if score is None else 0.0 for score in scores]
        means = {
            f"validation_{name}": sum(part.get(name, none) for part, none in zip(parts, otherwise, strict=True))
            / len(parts)
            for name in sorted({name for part in parts for name in part})
        }
        return {"validation_accuracy": accuracy, "validation_failed": float(failed), **means}

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
