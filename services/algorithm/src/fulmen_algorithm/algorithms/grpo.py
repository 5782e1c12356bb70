"""Group relative policy optimisation, asynchronous within a staleness limit.

Differences from the paper (arXiv:2402.03300): advantages are not divided by the standard deviation
(arXiv:2503.20783), the upper clip is higher than the lower one and groups without variance are refilled (DAPO,
arXiv:2503.14476), no KL penalty, and truncated importance weights against the sampler.

Each iteration first completes the present step, so that a run stopped anywhere resumes exactly there.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Self

from pydantic import Field, model_validator

from fulmen_algorithm.algorithms.batches import Batch, BatchBuilder, BatchLimits
from fulmen_algorithm.algorithms.monitors import SignalMonitor, tell_unchanged
from fulmen_algorithm.algorithms.options.curriculum import TaskOrder
from fulmen_algorithm.algorithms.options.curriculum_settings import CurriculumSettings, NoCurriculum
from fulmen_algorithm.algorithms.options.entropy_control import adapt_bonus
from fulmen_algorithm.algorithms.options.model_rewards import ModelRewards
from fulmen_algorithm.algorithms.options.model_rewards_settings import RewardModelUse, reward_model_conflict
from fulmen_algorithm.algorithms.options.opponent_settings import NoOpponent, OpponentSettings
from fulmen_algorithm.algorithms.options.opponents import Opponents
from fulmen_algorithm.algorithms.policy_gradient import PolicyGradientSettings, means
from fulmen_algorithm.algorithms.scoring import Scorer
from fulmen_algorithm.algorithms.validation import Validator
from fulmen_algorithm.losses.advantages import MIN_COMPARED, compares_groups
from fulmen_algorithm.policy.engine_settings import MismatchSettings, each_engine
from fulmen_algorithm.rollouts.admission import groups_admitted
from fulmen_algorithm.runs.algorithm import AlgorithmEntry
from fulmen_algorithm.runs.context import OnNoSignal, RunContext
from fulmen_algorithm.runs.failure import RunFailed
from fulmen_algorithm.runs.ports import Notify
from fulmen_algorithm.training.defaults import ModelFacts
from fulmen_algorithm.training.settings import StepResult
from fulmen_algorithm.training.strict import AUTO_BY_NAME

FEW_ROLLOUTS = 8
"""Rollouts of an optimiser step below which its gradient is mostly noise."""


class GrpoSettings(PolicyGradientSettings):
    """Settings of `grpo`, in addition to the common ones.

    Attributes:
        group_size: Rollouts per task.
        max_staleness: eta, maximum staleness of a rollout, in steps; 0 is fully synchronous.
        refill_limit: Maximum share of additional groups that replace groups without variance: a step examines at most
            prompts_per_step * (1 + refill_limit) groups, and trains on those with variance.
        engine_mismatch: Limits of the difference between the probabilities of engine and trainer.
        on_no_signal: Reaction if rewards do not differ within any group of the first ten steps: `stop` fails the run,
            `notice` records a notice. `"auto"` is `stop` on a local stack, and otherwise the operator's setting.
        curriculum: Order of the tasks: `none`, each once per epoch, or `difficulty`, which skips solved tasks and tries
            those that are nearly solved more often.
        opponents: Opponents of the policy in self-play: `none`, or `past`, which serves past versions as the model
            `<policy>-past`.
        reward_model: Reward model whose score is added to the reward of each training rollout, such as `{model =
            "judge@3", coefficient = 1.0}`; null for none. Validations use only the rewards of agent and grader.
    """

    group_size: int = Field(default=8, ge=2, le=1000)
    max_staleness: int = Field(default=4, ge=0, le=1000)
    refill_limit: float = Field(default=1.0, ge=0, le=100)
    engine_mismatch: MismatchSettings = MismatchSettings()
    on_no_signal: Annotated[OnNoSignal | None, AUTO_BY_NAME] = None
    curriculum: CurriculumSettings = NoCurriculum()
    opponents: OpponentSettings = NoOpponent()
    reward_model: RewardModelUse | None = None

    @property
    def scored_by(self) -> str:
        """See `AlgorithmSettings`."""
        return "" if self.reward_model is None else self.reward_model.resource

    @model_validator(mode="after")
    def _rewards_can_have_a_score(self) -> Self:
        if problem := reward_model_conflict(self.reward_model, self.scoring):
            raise ValueError(problem)
        if self.reward_model is not None and self.curriculum.kind != "none":
            raise ValueError(
                "curriculum: depends on the distance of rewards from 1, and a reward model's scores are unbounded"
            )
        return self

    @property
    def engines_beside(self) -> int:
        """See `RunSettings`."""
        return 0 if self.opponents.kind == "none" else len(each_engine(self.engine))

    @model_validator(mode="after")
    def _past_versions_can_be_served(self) -> Self:
        if self.opponents.kind == "none":
            return self
        needs = {
            "engine.kind embedded": self.engine.kind == "embedded",
            "weights.kind full": self.weights.kind == "full",
            "no lora": self.lora is None,
        }
        if missing := [what for what, there in needs.items() if not there]:
            raise ValueError(
                f"opponents: past versions are complete weights on a separate embedded engine; needs {', '.join(missing)}"
            )
        return self

    @property
    def earlier_runs(self) -> dict[str, str]:
        """See `RunSettings`."""
        return {"curriculum.run": self.curriculum.run} if self.curriculum.kind == "difficulty" else {}

    @model_validator(mode="after")
    def _rewards_of_a_curriculum_do_not_collapse(self) -> Self:
        if self.curriculum.kind != "none" and self.collapse.kind == "rollback":
            raise ValueError(
                "collapse: kind rollback depends on the mean reward, which falls with a curriculum that skips solved tasks"
            )
        return self

    @model_validator(mode="after")
    def _older_versions_may_sample(self) -> Self:
        if self.write_behind and not self.max_staleness:
            raise ValueError(
                "write_behind: needs max_staleness above 0: an older version samples while one is published"
            )
        if self.write_behind and self.opponents.kind != "none":
            raise ValueError(
                "write_behind: past versions are used as opponents as soon as they are published; set opponents to none"
            )
        return self

    @model_validator(mode="after")
    def _groups_can_be_compared(self) -> Self:
        if self.group_size < MIN_COMPARED and compares_groups(self.scoring):
            raise ValueError(
                f"group_size: must be at least 2, because {self.advantage.kind} compares the rollouts of a group"
            )
        return self

    def doubts(self, model: ModelFacts) -> Sequence[str]:
        """See `AlgorithmSettings`."""
        each = self.prompts_per_step * self.group_size / self.minibatches
        if each >= FEW_ROLLOUTS or not model.is_large:
            return super().doubts(model)
        return (
            *super().doubts(model),
            f"An optimiser step has {each:g} rollouts (prompts_per_step {self.prompts_per_step}, group_size"
            f" {self.group_size}, minibatches {self.minibatches}): its gradient is mostly noise.",
        )


class Grpo:
    """Samples groups, trains on each rollout relative to its group, publishes, and repeats."""

    def __init__(self, settings: GrpoSettings) -> None:
        self._settings = settings

    async def run(self, ctx: RunContext) -> None:
        """Trains to the end; see `Algorithm`."""
        settings = self._settings
        watch = MismatchMonitor(settings.engine_mismatch, ctx.notify)
        signal = SignalMonitor(
            ctx.notify,
            on_no_signal=settings.on_no_signal or ctx.on_no_signal,
            over=len(ctx.progress.consumed) > ctx.progress.dropped,
        )
        validator = Validator(ctx, scorer=Scorer(settings.scoring), failure_reward=settings.failure_reward)
        batches = BatchBuilder(
            ctx,
            source=ctx.rollouts,
            limits=BatchLimits(
                groups=settings.prompts_per_step,
                max_groups=int(settings.prompts_per_step * (1 + settings.refill_limit)),
                max_staleness=settings.max_staleness,
                lengths=settings.length_limits,
            ),
            scoring=settings.scoring,
            policy=ctx.run.policy.name,
            penalty=settings.reference_penalty(ctx),
            teacher=settings.teacher_for(ctx),
            model_rewards=ModelRewards(ctx, settings.reward_model, token_budget=settings.token_budget)
            if settings.reward_model is not None
            else None,
        )
        order = TaskOrder(ctx, settings.curriculum, seed=settings.seed, reward_of=Scorer(settings.scoring).total)
        opponents = Opponents(ctx, settings.opponents, seed=settings.seed, overrides=settings.overrides)
        with ctx.recorder.spending("start"):
            opponents.begin()
            await order.begin()
            await ctx.policy.serve(settings.overrides)
        metrics: dict[str, float] = {}
        began, tokens = time.monotonic(), await ctx.policy.sampled_tokens()
        while True:
            step = ctx.progress.step
            last = step == settings.steps
            validates = step % settings.validate_every == 0 or last or ctx.recorder.pauses
            with ctx.recorder.spending("publish"):
                # What is validated is what is served.
                await ctx.policy.publish(behind=settings.write_behind and not validates)
                metrics |= ctx.policy.publish_metrics
                faced = await opponents.refresh()
            with ctx.recorder.spending("submit"):
                await self._admit(ctx, order)
            if validates:
                with ctx.recorder.spending("validate"):
                    metrics |= await validator.validate(last=last)
            if metrics or not ctx.progress.ended:
                sampled = await ctx.policy.sampled_tokens()
                metrics |= _rates(metrics, seconds=time.monotonic() - began, tokens=sampled - tokens)
                began, tokens = time.monotonic(), sampled
                await ctx.recorder.end_step(metrics)
            if last:
                tell_unchanged(ctx.progress, ctx.notify)
                return
            with ctx.recorder.spending("generation_wait"):
                batch = await batches.collect(
                    refill=lambda: self._admit(ctx, order, seen=batches.seen, kept=batches.settled)
                )
            with ctx.recorder.spending("train"):
                results = await self._train(ctx, batch)
                ctx.recorder.commit(batch.consumed, changed=any(result.taken for result in results))
            metrics = {**batch.metrics, **means(results)}
            metrics |= faced | order.learn(consumed.group for consumed in batch.consumed)
            metrics |= adapt_bonus(ctx, settings.entropy, metrics)
            watch.check(ctx.progress.step, metrics)
            signal.check(ctx.progress.step, metrics)
            ctx.recorder.result(reward_mean=metrics["reward_mean"])

    async def _train(self, ctx: RunContext, batch: Batch) -> list[StepResult]:
        step = ctx.progress.step
        return await ctx.policy.train(
            batch.rows,
            settings=self._settings.fitted(ctx, batch.rows).step_settings,
            batch=replace(self._settings.batch_settings, measure_mismatch=True),
            seed=self._settings.shuffling_seed(step),
            current_version=step,
        )

    async def _admit(self, ctx: RunContext, order: TaskOrder, *, seen: int = 0, kept: int = 0) -> None:
        """Submits as many groups as the admission rule allows.

        Args:
            ctx: The run.
            order: Order of its tasks.
            seen: Groups consumed in the step being collected.
            kept: Those of them that need no refill.
        """
        settings = self._settings
        allowed = groups_admitted(
            running=ctx.rollouts.submitted - len(ctx.progress.consumed) - seen,
            kept=kept,
            version=ctx.progress.step,
            groups_per_step=settings.prompts_per_step,
            max_staleness=settings.max_staleness,
            steps=settings.steps,
        )
        if allowed:
            await order.submit_next(size=settings.group_size, count=allowed)


def _rates(metrics: Mapping[str, float], *, seconds: float, tokens: int) -> dict[str, float]:
    """Computes rates over the wall time since the last report."""
    if "rollouts" not in metrics:
        return {}
    return {
        "rollouts_per_second": metrics["rollouts"] / seconds,
        # All tokens that the engine has sampled, those of validations and of groups without variance too.
        "tokens_per_second": tokens / seconds,
        "step_seconds": seconds,
    }


class MismatchMonitor:
    """Checks after each step that the engine samples the distribution that is trained.

    Nothing else detects a wrong engine: with an ignored temperature, other weights or another chat template, a run
    trains as usual, but wrongly.
    """

    def __init__(self, check: MismatchSettings, notify: Notify) -> None:
        self._check = check
        self._notify = notify
        self._warned_at: int | None = None

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
        if self._warned_at is None or step - self._warned_at >= self._check.every:
            self._warned_at = step
            self._notify("warning", f"{text} Does it use this temperature, these weights, this template?")


ENTRIES = (
    AlgorithmEntry(
        name="grpo", settings=GrpoSettings, make=Grpo, needs=("agent", "train_tasks"), takes=("validation_tasks",)
    ),
)
