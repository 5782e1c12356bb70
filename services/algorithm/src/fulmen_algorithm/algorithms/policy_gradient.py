"""Settings and metrics of the policy-gradient algorithms on groups."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Annotated, Self

from pydantic import Field, model_validator

from fulmen_algorithm.algorithms.monitors import LengthLimits
from fulmen_algorithm.algorithms.options.entropy_control import present_bonus
from fulmen_algorithm.algorithms.options.teacher import Teacher, teacher_of
from fulmen_algorithm.algorithms.options.teacher_settings import (
    NoTeacher,
    SelfTeacher,
    TeacherSettings,
    teacher_conflict,
)
from fulmen_algorithm.algorithms.reference_penalty import ReferencePenalty, penalty_conflict
from fulmen_algorithm.algorithms.sampling import SamplingSettings
from fulmen_algorithm.losses.advantage_settings import (
    AdvantageSettings,
    CreditSettings,
    CriticPlan,
    CriticSettings,
    GaeAdvantage,
    GroupAdvantage,
    Overlong,
    RewardSettings,
    RoleSettings,
    RolloutCredit,
    ScoringSettings,
    check_scoring,
)
from fulmen_algorithm.losses.entropy_settings import EntropyBonus, EntropySettings, NoEntropyBonus
from fulmen_algorithm.losses.objectives import (
    Aggregation,
    ClipLoss,
    Correction,
    Kl,
    Loss,
    NoKl,
    Objective,
    PerRolloutMean,
    Proximal,
    RewardKl,
    SequenceMeanTokenSumNorm,
    TokenCorrection,
    TokenMean,
    conflict,
)
from fulmen_algorithm.runs.algorithm import short_warm_up
from fulmen_algorithm.runs.context import RunContext
from fulmen_algorithm.training.defaults import ModelFacts
from fulmen_algorithm.training.rows import Row, calls_per_rollout
from fulmen_algorithm.training.settings import (
    BatchSettings,
    StepResult,
    StepSettings,
)
from fulmen_algorithm.training.strict import AUTO_BY_NAME, NONE_BY_NAME

EXCHANGE_COSTS = ("_bytes", "_seconds", "_rounds", "_missed_sums")
"""Suffixes of the names of exchange costs."""
MULTI_TURN = "multi_turn"
SEVERAL_CALLS = 1.1
"""Model calls per rollout from which an agent counts as one of several turns."""


class PolicyGradientSettings(SamplingSettings):
    """Settings in addition to those of sampling. The defaults were tested on models of 0.5 to 5 M parameters.

    Attributes:
        epochs: Passes over the rows of a step.
        minibatches: Optimiser steps per pass.
        loss: Loss per token: `clip`, `gspo`, `cispo`, `sapo`, `dppo`, `clip_cov`, `kl_cov`, `reinforce` or
            `importance`.
        correction: Off-policy correction of rows sampled by an older policy: `none`, `token`, `sequence`,
            `sequence_mask`, `geometric`, `icepop` or `decoupled`.
        kl: KL penalty against the initial weights: `none`, `loss` or `reward`.
        entropy: Bonus for the entropy of the policy: `none`, `bonus` with a constant coefficient, or `target`, which
            adapts it.
        aggregation: Weights of tokens: `token_mean`, `per_rollout_mean`, `sequence_mean_token_mean`,
            `sequence_mean_token_sum_norm` or `prompt_mean`. `"auto"` chooses by the first rollouts: `per_rollout_mean`
            if they make several model calls, so that long failures do not count more than short successes, else
            `token_mean`.
        proximal: Policy in the denominator of the ratio: `recomputed`, the trained one at the start of the batch, or
            `sampler`.
        advantage: Advantage estimator: `group`, `rloo`, `reinforce_pp`, `opo`, `maxrl`, `gae` with a critic, or
            `none` with a teacher.
        teacher: Adds to the advantage of each token how much more likely it is under a teacher: `none`, `model`,
            served behind the LLM proxy, or `self`, the policy's own weights with a hint.
        rewards: Dimensions of the reward, their weights and normalisation.
        overlong: Penalty for length, such as `{max_tokens = 512, buffer_tokens = 64}`; `"none"` for none. Rollouts
            that `mask_truncated` leaves out are not penalised.
        critic: Critic for `gae`.
        credit: One advantage per rollout (`rollout`) or per step (`step_return`, `step_groups`).
        roles: Agents of a rollout that train, and their baselines.
        mask_truncated: Leaves out rollouts whose answer reached the token limit, instead of scoring them.
    """

    warmup_steps: int = Field(default_factory=short_warm_up(5), ge=0)
    epochs: int = Field(default=1, ge=1, le=100)
    minibatches: int = Field(default=4, ge=1, le=1000)
    loss: Loss = ClipLoss()
    correction: Correction = TokenCorrection()
    kl: Kl = NoKl()
    entropy: EntropySettings = NoEntropyBonus()
    aggregation: Annotated[Aggregation | None, AUTO_BY_NAME] = None
    proximal: Proximal = Proximal.RECOMPUTED
    advantage: AdvantageSettings = GroupAdvantage()
    teacher: TeacherSettings = NoTeacher()
    critic: CriticSettings = CriticSettings()
    rewards: RewardSettings = RewardSettings()
    overlong: Annotated[Overlong | None, NONE_BY_NAME] = None
    credit: CreditSettings = RolloutCredit()
    roles: RoleSettings = RoleSettings()
    mask_truncated: bool = False

    @model_validator(mode="after")
    def _objective_fits_together(self) -> Self:
        if problem := conflict(self.loss, self.correction, self.proximal):
            raise ValueError(problem)
        check_scoring(self.advantage, self.rewards, self.credit, self.roles)
        if self.critic != CriticSettings() and self.critic_plan is None:
            raise ValueError("critic: only advantage gae uses a critic")
        if self.lora is not None and self.lora.roles and (alone := set(self.roles.train) - set(self.lora.roles)):
            raise ValueError(f"roles.train: lora.roles has no adapter for {', '.join(sorted(alone))}")
        if problem := penalty_conflict(self.kl, self.scoring):
            raise ValueError(problem)
        if problem := teacher_conflict(self.teacher, self.scoring, self.temperature):
            raise ValueError(problem)
        return self

    @property
    def optimizer_steps_per_step(self) -> int:
        """Maximum number of optimiser steps in one step of the run."""
        return self.epochs * self.minibatches

    @property
    def uses_reference(self) -> bool:
        """Whether a reference policy is needed."""
        hinted = isinstance(self.teacher, SelfTeacher) and self.teacher.weights == "initial"
        return hinted or not isinstance(self.kl, NoKl)

    @property
    def critic_plan(self) -> CriticPlan | None:
        """Settings of the critic for `gae`."""
        if not isinstance(self.advantage, GaeAdvantage):
            return None
        return CriticPlan(critic=self.critic, advantage=self.advantage)

    @property
    def objective(self) -> Objective:
        """Objective of an optimiser step."""
        aggregation = self.aggregation or TokenMean()
        if isinstance(aggregation, SequenceMeanTokenSumNorm) and aggregation.length is None:
            aggregation = SequenceMeanTokenSumNorm(length=self.answer_tokens)
        return Objective(
            loss=self.loss,
            correction=self.correction,
            kl=self.kl,
            aggregation=aggregation,
            proximal=self.proximal,
            entropy_coefficient=self.entropy.coefficient if isinstance(self.entropy, EntropyBonus) else 0.0,
        )

    @property
    def scoring(self) -> ScoringSettings:
        """Settings of rewards and advantages."""
        return ScoringSettings(
            advantage=self.advantage,
            rewards=self.rewards,
            overlong=None if self.overlong is None else self.overlong.settings(self.answer_tokens),
            credit=self.credit,
            roles=self.roles,
        )

    def for_model(self, model: ModelFacts) -> Self:
        """See `AlgorithmSettings`."""
        fitted = super().for_model(model)
        overlong = fitted.overlong
        if overlong is None or overlong.max_tokens is not None or overlong.buffer_tokens is None:
            return fitted
        # A buffer that was given for the answers of a larger model.
        buffer = min(overlong.buffer_tokens, fitted.answer_tokens)
        return fitted.model_copy(update={"overlong": overlong.model_copy(update={"buffer_tokens": buffer})})

    @property
    def length_limits(self) -> LengthLimits:
        """Limits of lengths, beyond which rollouts are cut off or left out."""
        return LengthLimits(
            mask_truncated=self.mask_truncated, max_tokens=self.answer_tokens, token_budget=self.token_budget
        )

    @property
    def step_settings(self) -> StepSettings:
        """Settings of an optimiser step."""
        return StepSettings(
            objective=self.objective,
            temperature=self.temperature,
            max_grad_norm=self.max_grad_norm,
            explosion_factor=self.explosion_factor,
            token_budget=self.token_budget,
        )

    @property
    def batch_settings(self) -> BatchSettings:
        """Settings of the optimiser steps of a batch."""
        return BatchSettings(minibatches=self.minibatches, epochs=self.epochs)

    def reference_penalty(self, ctx: RunContext) -> ReferencePenalty | None:
        """KL penalty subtracted from rewards; None for none."""
        if not isinstance(self.kl, RewardKl):
            return None
        return ReferencePenalty(ctx, kl=self.kl, settings=self.step_settings)

    def teacher_for(self, ctx: RunContext) -> Teacher | None:
        """Teacher that adds to the advantages; None for none."""
        return teacher_of(ctx, self.teacher, self.step_settings)

    def fitted(self, ctx: RunContext, rows: Sequence[Row]) -> Self:
        """Returns the settings of the current step: the settings that fit the agent, chosen by the first rows, and the
        bonus.

        The run keeps to what the first rows chose.
        """
        settings = self.model_copy(update={"entropy": present_bonus(ctx, self.entropy)})
        if self.aggregation is not None or not rows:
            return settings
        multi_turn = ctx.progress.memory.get(MULTI_TURN)
        if multi_turn is None:
            calls = calls_per_rollout(rows)
            multi_turn = calls >= SEVERAL_CALLS
            ctx.recorder.remember(**{MULTI_TURN: multi_turn})
            chosen = "per_rollout_mean" if multi_turn else "token_mean"
            ctx.notify("info", f"aggregation is {chosen}: a rollout makes {calls:.1f} model calls on average.")
        return settings.model_copy(update={"aggregation": PerRolloutMean() if multi_turn else TokenMean()})

    def shuffling_seed(self, step: int) -> int:
        """Returns the seed of a step's minibatches."""
        return self.seed * 1_000_003 + step


def exchanged(metrics: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Sums the costs of exchanges; averages metrics measured in some rounds over those rounds."""
    found: dict[str, float] = {}
    for name in dict.fromkeys(name for each in metrics for name in each):
        values = [each[name] for each in metrics if name in each]
        found[name] = sum(values) if name.endswith(EXCHANGE_COSTS) else fmean(values)
    if moved := found.get("exchange_sent_bytes", 0.0) + found.get("exchange_received_bytes", 0.0):
        found["exchange_ratio"] = 2.0 * found["exchange_raw_bytes"] / moved
    return found


def means(results: Sequence[StepResult]) -> dict[str, float]:
    """Averages the metrics of the optimiser steps of one training step; counts are summed, `_max` is the largest."""
    if not results:
        return {"optimizer_steps": 0.0}
    metrics = [replace(r, exchange={}).as_metrics() for r in results]
    averages = {key: sum(m.get(key, 0.0) for m in metrics) / len(metrics) for key in metrics[-1] if key != "seconds"}
    averages["tokens"] = sum(m.get("tokens", 0.0) for m in metrics)
    for key in (key for key in averages if key.endswith("_max")):
        averages[key] = max(m.get(key, 0.0) for m in metrics)
    return {
        **averages,
        **exchanged([r.exchange for r in results]),
        "skipped": float(sum(r.skipped for r in results)),
        "exploded": float(sum(r.exploded for r in results)),
        "train_seconds": sum(r.seconds for r in results),
        "optimizer_steps": float(len(results)),
    }
