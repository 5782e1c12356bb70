"""Sampling settings and the order of tasks, for algorithms that sample rollouts from their policy.

The task of a group is a function of the group's index and the seed, so that a resumed run submits exactly the missing
groups.
"""

from collections.abc import Sequence

from pydantic import Field

from fulmen_algorithm.rollouts.groups import FinishedGroup, Mode
from fulmen_algorithm.rollouts.trajectory import RolloutTrajectory, TokenSequence
from fulmen_algorithm.runs.algorithm import AlgorithmSettings, RolloutLimits, permutation
from fulmen_algorithm.runs.context import RunContext
from fulmen_algorithm.training.rows import NO_VERSION, Row, spread_advantage
from fulmen_algorithm.training.settings import StepSettings

GREEDY = 0
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
        max_tokens: Maximum length of the answer to one model call, in tokens.
        validate_every: Steps between validations, in addition to one at the start and one at the end.
        failure_reward: Reward of a failed rollout in a validation; choose at most the worst
            reward, so that failures do not raise the mean.
        rollout_timeout_s: Limit of one attempt, in seconds.
        rollout_attempts: Maximum number of attempts of one rollout; failures of the agent are not retried.
        rollout_restart_lost: Whether an attempt after a lost one samples everything anew; otherwise it goes on where that one was.
    """

    prompts_per_step: int = Field(default=32, ge=1, le=4096)
    temperature: float = Field(default=1.0, gt=0, le=2)
    max_tokens: int = Field(default=64, ge=1, le=1_048_576)
    validate_every: int = Field(default=20, ge=1)
    failure_reward: float = 0.0
    rollout_timeout_s: float = Field(default=120.0, gt=0, le=86400)
    rollout_attempts: int = Field(default=8, ge=1, le=100)
    rollout_restart_lost: bool = False

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
            "max_tokens": self.max_tokens,
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


async def submit_next(ctx: RunContext, *, size: int, seed: int) -> None:
    """Submits the next training group: a task of the present epoch's permutation.

    Raises:
        Interrupted: if the run was asked to stop.
    """
    tasks = ctx.inputs.train_tasks
    epoch, offset = divmod(ctx.rollouts.next_index, len(tasks))
    await ctx.rollouts.submit(tasks[permutation(len(tasks), seed, epoch)[offset]], size=size)


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
    for _ in range(count - (ctx.rollouts.submitted - len(ctx.progress.consumed))):
        await submit_next(ctx, size=size, seed=seed)
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
    """
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
    )
