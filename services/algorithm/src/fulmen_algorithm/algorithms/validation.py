"""Measures a policy version on the validation tasks: greedy by the route's overrides, one rollout each."""

from collections.abc import Sequence

from fulmen_algorithm.domain.context import RunContext
from fulmen_algorithm.domain.groups import FinishedGroup

SAMPLE = 0
"""Which validation task is shown in the report, before and after."""


class Validator:
    """Validates the present weights of a run."""

    def __init__(self, ctx: RunContext) -> None:
        self._ctx = ctx

    async def validate(self, *, last: bool) -> dict[str, float]:
        """Runs every validation task once, unless the present step was validated.

        A rollout that failed counts as reward 0 here, because an accuracy must not rise by failures; their number is
        a figure of its own.

        Args:
            last: Whether this is the validation at the end.

        Raises:
            Interrupted: if the run was asked to stop.
        """
        ctx, tasks = self._ctx, self._ctx.inputs.validation_tasks
        if not tasks or ctx.progress.validated_step == ctx.progress.step:
            return {}
        groups = await ctx.rollouts.validate(tasks, version=ctx.policy.version)
        rewards = [g.rollouts[0].reward or 0.0 for g in groups]
        accuracy = sum(rewards) / len(rewards)
        failed = sum(not g.rollouts[0].scored for g in groups)
        if ctx.progress.step == 0:
            ctx.recorder.result(validation_accuracy_before=accuracy)
            await self._keep_sample("before", groups)
        if last:
            ctx.recorder.result(validation_accuracy_after=accuracy)
            await self._keep_sample("after", groups)
        if accuracy >= ctx.progress.results.get("validation_accuracy_best", 0.0):
            ctx.recorder.result(validation_accuracy_best=accuracy)
            ctx.policy.mark_best()
        ctx.recorder.result(validation_accuracy=accuracy)
        ctx.recorder.validated()
        if failed:
            ctx.notify("warning", f"{failed} of {len(groups)} validation rollouts failed; they count as 0.")
        return {"validation_accuracy": accuracy, "validation_failed": float(failed)}

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
