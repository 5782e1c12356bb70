"""Sampling settings and the order of tasks, for algorithms that sample rollouts from their policy.

The task of a group is a function of the group's index and the seed, so that a resumed run submits exactly the missing
groups.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Self, TypeVar

from pydantic import Field

from fulmen_algorithm.rollouts.groups import FinishedGroup, Mode
from fulmen_algorithm.rollouts.trajectory import RolloutTrajectory, TokenSequence
from fulmen_algorithm.runs.algorithm import AlgorithmSettings, RolloutLimits, permutation
from fulmen_algorithm.runs.context import RunContext
from fulmen_algorithm.training.defaults import LARGE_TOKENS, ModelFacts
from fulmen_algorithm.training.rows import NO_VERSION, Row, spread_advantage
from fulmen_algorithm.training.settings import StepSettings
from fulmen_algorithm.training.strict import AUTO_BY_NAME

T = TypeVar("T")
GREEDY = 0
FEW_TOKENS = 64
"""An answer of fewer tokens is seldom what is asked of a large model."""
RESHAPING = (
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
)
"""Request fields with which an agent could change the sampled distribution; the trainer does not support them."""


class SamplingSettings(AlgorithmSettings):
    """Settings in addition to those of every algorithm.

    Attributes:
        prompts_per_step: B, groups per training step.
        temperature: Sampling temperature of training rollouts.
        max_tokens: Maximum length of the answer to one model call, in tokens; `"auto"` chooses it by the size of the
            model: 64 up to 1 million parameters, 1024 from 500 million, and at most half of its maximum sequence length.
        validate_every: Steps between validations, in addition to one at the start and one at the end.
        failure_reward: Reward of a failed rollout in a validation; choose at most the worst
            reward, so that failures do not raise the mean.
        rollout_timeout_s: Limit of one attempt, in seconds.
        rollout_attempts: Maximum number of attempts of one rollout; failures of the agent are not retried.
        rollout_restart_lost: Whether an attempt after a lost one samples everything anew; otherwise it continues where the lost one
            was.
    """

    prompts_per_step: int = Field(default=32, ge=1, le=4096)
    temperature: float = Field(default=1.0, gt=0, le=2)
    max_tokens: Annotated[int | None, AUTO_BY_NAME] = Field(default=None, ge=1, le=1_048_576)
    validate_every: int = Field(default=20, ge=1)
    failure_reward: float = 0.0
    rollout_timeout_s: float = Field(default=120.0, gt=0, le=86400)
    rollout_attempts: int = Field(default=8, ge=1, le=100)
    rollout_restart_lost: bool = False

    @property
    def answer_tokens(self) -> int:
        """Maximum length of the answer to one model call; that of large models as long as the model is not known."""
        return self.max_tokens or LARGE_TOKENS

    def for_model(self, model: ModelFacts) -> Self:
        """See `AlgorithmSettings`."""
        tokens = self.max_tokens or model.answer_tokens
        return super().for_model(model).model_copy(update={"max_tokens": tokens})

    def choices(self, model: ModelFacts) -> Sequence[str]:
        """See `AlgorithmSettings`."""
        if self.max_tokens is not None:
            return ()
        halved = model.longest and model.answer_tokens == model.longest // 2
        why = f"half of the model's context length of {model.longest} tokens" if halved else f"the default for {model}"
        return (f"max_tokens is {model.answer_tokens}: {why}.",)

    def doubts(self, model: ModelFacts) -> Sequence[str]:
        """See `AlgorithmSettings`."""
        tokens, found = self.max_tokens or model.answer_tokens, []
        if model.longest and tokens >= model.longest:
            found.append(
                f"max_tokens is {tokens}: the model's context length is {model.longest} tokens, which leaves no room for a prompt."
            )
        if tokens >= self.token_budget:
            found.append(
                f"max_tokens is {tokens}, and token_budget {self.token_budget}: rollouts with longer rows are left out. Raise"
                " token_budget."
            )
        if self.max_tokens is not None and tokens < FEW_TOKENS and model.is_large:
            found.append(
                f"max_tokens is {tokens}: answers of a model of {model} are seldom this short, and longer answers are cut off."
            )
        return found

    @property
    def samples(self) -> bool:
        """See `AlgorithmSettings`."""
        return True

    @property
    def rollout_limits(self) -> RolloutLimits:
        """Limits of the run's rollouts."""
        return RolloutLimits(
            timeout_s=self.rollout_timeout_s, attempts=self.rollout_attempts, restart_lost=self.rollout_restart_lost
        )

    @property
    def overrides(self) -> dict[str, dict[str, object]]:
        """Request fields by rollout mode: training samples, everything else is greedy; null leaves a field out."""
        # An engine may refuse a field that it does not know, whatever its value.
        common: dict[str, object] = {
            "max_tokens": self.answer_tokens,
            # The newer name of the same; an engine that is given both takes this one.
            "max_completion_tokens": None,
            **dict.fromkeys(RESHAPING),
        }
        return {
            # All that is left out of the distribution here would be there in the trainer's.
            "train": {"temperature": self.temperature, "top_p": 1.0, **common},
            # The validated policy is the trained one.
            "validation": {"temperature": GREEDY, **common},
            "test": {"temperature": GREEDY, **common},
        }

    @property
    def supervised_step(self) -> StepSettings:
        """Settings of a step of `policy.train_supervised`."""
        return StepSettings(
            max_grad_norm=self.max_grad_norm,
            explosion_factor=self.explosion_factor,
            token_budget=self.token_budget,
        )


def measuring_overrides(*, temperature: float, max_tokens: int | None) -> dict[str, dict[str, object]]:
    """Returns the request fields by rollout mode for a version that is not trained.

    Args:
        temperature: Sampling temperature.
        max_tokens: Maximum length of the answer to one model call, in tokens; None for the agent's own limit.
    """
    fields: dict[str, object] = {"temperature": temperature}
    if max_tokens is not None:
        fields |= {"max_tokens": max_tokens, "max_completion_tokens": None}
    return {mode.value: fields for mode in Mode}


def task_index(index: int, count: int, seed: int) -> int:
    """Returns which of `count` tasks the training group `index` has: each once per epoch, in a new order."""
    epoch, offset = divmod(index, count)
    return permutation(count, seed, epoch)[offset]


async def submit_next(ctx: RunContext, *, size: int, seed: int, count: int = 1) -> None:
    """Submits the next training groups: tasks of the present epoch's permutation.

    Raises:
        Interrupted: if the run was asked to stop.
    """
    tasks = ctx.inputs.train_tasks
    chosen = [tasks[task_index(index, len(tasks), seed)] for index in ctx.rollouts.upcoming(count)]
    await ctx.rollouts.submit(*chosen, size=size)


async def sample_groups(ctx: RunContext, *, count: int, size: int, seed: int) -> list[FinishedGroup]:
    """Returns `count` finished groups that no step has consumed, in the order of the feed; submits missing ones.

    Args:
        ctx: The run.
        count: Number of groups.
        size: Rollouts per group.
        seed: Seed of the order of tasks.

    Raises:
        Interrupted: if the run was asked to stop; a repeated call returns the same groups.
    """
    missing = count - (ctx.rollouts.submitted - len(ctx.progress.consumed))
    if missing > 0:
        await submit_next(ctx, size=size, seed=seed, count=missing)
    groups: list[FinishedGroup] = []
    while len(groups) < count:
        groups += await ctx.rollouts.poll(limit=count - len(groups))
    return groups


def supervised_rows(name: str, trajectory: RolloutTrajectory | None, *, policy: str = "") -> list[Row]:
    """Builds rows that imitate a rollout, from the sampled tokens.

    Args:
        name: The rollout.
        trajectory: Trajectory of the rollout; None or an unusable one gives no rows.
        policy: Policy whose sequences are used; empty for all policies.
    """
    if trajectory is None or trajectory.unusable:
        return []
    return [
        sequence_row(name, sequence, advantages=spread_advantage(1.0, sequence.loss_mask))
        for sequence in trajectory.sequences
        if any(sequence.loss_mask) and (not policy or sequence.policy in ("", policy))
    ]


def within(rows: Sequence[Row], token_budget: int) -> list[Row]:
    """Leaves out the rows that exceed the token budget of a micro-batch."""
    return [row for row in rows if len(row.token_ids) <= token_budget]


def sequence_row(
    name: str,
    sequence: TokenSequence,
    *,
    advantages: tuple[float, ...],
    versions: tuple[int, ...] | None = None,
    group: str = "",
    rewards: tuple[float, ...] = (),
    steps: tuple[int, ...] = (),
    forced: tuple[bool, ...] = (),
) -> Row:
    """Builds the row of a sequence; see `Row` for the arguments.

    Args:
        name: The rollout.
        sequence: One of its sequences.
        advantages: Advantage of each token.
        versions: Policy version of each token; None if irrelevant.
        group: Group of the rollout; empty for none.
        rewards: Reward of each token, for a critic; empty without one.
        steps: Agent step of each token, for a critic; empty without one.
        forced: True where a token was sampled, but does not train; empty for none.
    """
    if any(forced):
        trains = tuple(sampled and not no for sampled, no in zip(sequence.loss_mask, forced, strict=True))
        sequence = replace(sequence, loss_mask=trains, logprobs=_where(trains, sequence.logprobs, 0.0), calls=())
        advantages = _where(trains, advantages, 0.0)
        versions = None if versions is None else _where(trains, versions, NO_VERSION)
    else:
        forced = ()
    return Row(
        rollout_id=name,
        token_ids=sequence.token_ids,
        loss_mask=sequence.loss_mask,
        old_logprobs=sequence.logprobs,
        advantages=advantages,
        policy_versions=(NO_VERSION,) * len(sequence.token_ids) if versions is None else versions,
        group=group,
        role=sequence.role,
        rewards=rewards,
        steps=steps,
        forced=forced,
        routed_experts=sequence.routed_experts,
    )


def _where(trains: Sequence[bool], values: Sequence[T], otherwise: T) -> tuple[T, ...]:
    return tuple(value if here else otherwise for here, value in zip(trains, values, strict=True))
