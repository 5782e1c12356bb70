"""Best-of-n distillation: the policy imitates the best of its own n answers to each task (docs/extending.md)."""

from fulmen_algorithm.extension import (
    AlgorithmEntry,
    Consumed,
    Outcome,
    RunContext,
    SamplingSettings,
    sample_groups,
    supervised_rows,
)


class BestOfNSettings(SamplingSettings):
    n: int = 8


class BestOfN:
    def __init__(self, settings: BestOfNSettings) -> None:
        self.settings = settings

    async def run(self, ctx: RunContext) -> None:
        settings = self.settings
        await ctx.policy.serve(settings.overrides)
        while ctx.progress.step < settings.steps:
            await ctx.policy.publish()  # swaps the latest weights into the engine
            groups = await sample_groups(ctx, count=settings.prompts_per_step, size=settings.n, seed=settings.seed)
            trajectories = await ctx.rollouts.trajectories(groups)
            rows, consumed, rewards = [], [], []
            for group in groups:
                scored = [each for each in group.rollouts if each.scored]
                rewards += [each.reward for each in scored]
                best = max(scored, key=lambda each: each.reward, default=None)
                learned = supervised_rows(best.name, trajectories.get(best.name)) if best else []
                outcome = Outcome.TRAINED if learned else Outcome.TOO_FEW_USABLE
                rows += learned
                consumed.append(Consumed(group=group, outcome=outcome, trained=(best.name,) if learned else ()))
            if rows:
                await ctx.policy.train_supervised(rows, settings=settings.supervised_step)
            ctx.recorder.commit(consumed)  # directly after the change of the weights
            reward_mean = sum(rewards) / max(len(rewards), 1)
            ctx.recorder.result(reward_mean=reward_mean)
            await ctx.recorder.end_step({"reward_mean": reward_mean, "rows": float(len(rows))})
        await ctx.policy.publish()


ENTRIES = (AlgorithmEntry(name="best_of_n", settings=BestOfNSettings, make=BestOfN, needs=("agent", "train_tasks")),)
