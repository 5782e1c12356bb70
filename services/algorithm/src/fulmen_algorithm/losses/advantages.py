# ruff: noqa: N803, N806 (array names end with their shape)
"""Advantages, computed once per sample over whole groups; the rows of a rollout inherit them.

A sample is a rollout, or the part of one role in it. Everything is float64. If all samples of a group are equal, their
advantages are set to exactly 0, because the mean of equal floats may differ from them in the last bit.

Legend: S samples or steps, N trained tokens of a sample in the order in which they were sampled.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from fulmen_algorithm.losses.advantage_settings import (
    UNWEIGHTED,
    GaeAdvantage,
    GroupAdvantage,
    MaxRlAdvantage,
    NoAdvantage,
    OpoAdvantage,
    ReinforcePpAdvantage,
    RlooAdvantage,
    ScoringSettings,
    StepGroupsCredit,
    StepReturnCredit,
)

STD_EPSILON = 1e-6
"""Added to every standard deviation (population, ddof 0) used as a divisor."""

MIN_COMPARED = 2
"""Minimum number of rollouts to compare within a group."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The tokens of one agent step of a sample.

    Attributes:
        unit: Number of the step in the rollout, from 0.
        tokens: Number of tokens sampled by the policy in the step.
        reward: R(u), the reward of the step; the last step includes the final reward.
        credit: Credit of its calls.
        anchor: State before the step; equal for steps that are compared.
    """

    unit: int
    tokens: int
    reward: float
    credit: float
    anchor: Hashable = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The data from which one advantage is computed.

    Attributes:
        key: Unique key of the sample.
        group: Key of the group of samples that are compared.
        rewards: Final rewards by dimension.
        tokens: N, number of tokens sampled by the policy.
        overlong: Penalty for length, 0 or less, in the unit of the weighted reward. It is not a dimension of the
            reward: estimators that scale rewards add it to what they have scaled.
        steps: Steps in order, N tokens together; empty for credit by rollout.
        penalties: N numbers subtracted from the reward of each token, such as a KL penalty; empty for none.
    """

    key: str
    group: Hashable
    rewards: Mapping[str, float]
    tokens: int
    overlong: float = 0.0
    steps: tuple[Step, ...] = field(default=())
    penalties: tuple[float, ...] = field(default=())

    def earned(self, weights: Mapping[str, float] | None) -> float:
        """Computes the weighted sum of the rewards with the penalty for length; without weights, each weight is 1."""
        return float(sum(value * _weight(weights, name) for name, value in self.rewards.items())) + self.overlong

    def total(self, weights: Mapping[str, float] | None) -> float:
        """Returns the reward minus the penalties of all tokens."""
        return self.earned(weights) - float(sum(self.penalties))


def token_advantages(samples: Sequence[Sample], settings: ScoringSettings) -> list[Floats]:
    """Computes the advantage of every token of the samples of one batch.

    With a critic (`gae`) these are the token rewards instead: the advantages need the critic's values.

    Raises:
        ValueError: if samples are empty, two have the same key, a reward is not finite, or the estimator is not
            defined for the rewards (`maxrl` below 0).
    """
    _check(samples)
    match settings.advantage:
        case GaeAdvantage():
            return [_token_rewards(s, settings) for s in samples]
        case NoAdvantage():
            return [np.zeros(s.tokens) for s in samples]
        case ReinforcePpAdvantage() as advantage:
            return _reinforce_pp(samples, settings, advantage)
        case GroupAdvantage() as advantage if isinstance(settings.credit, StepReturnCredit):
            return _by_step(samples, _step_return(samples, advantage, settings.credit))
        case GroupAdvantage() as advantage if isinstance(settings.credit, StepGroupsCredit):
            whole = np.repeat(_by_sample(samples, settings), [len(s.steps) for s in samples])
            return _by_step(samples, whole + settings.credit.weight * _step_groups(samples, advantage))
        case _:
            values = _by_sample(samples, settings)
            return [np.full(s.tokens, value) for s, value in zip(samples, values, strict=True)]


def has_signal(samples: Sequence[Sample], settings: ScoringSettings) -> bool:
    """Returns whether any advantage of a group's samples is non-zero.

    Estimators that do not compare within the group see a signal in every group.

    Raises:
        ValueError: as `token_advantages`.
    """
    if not compares_groups(settings):
        return bool(samples)
    return any(bool(values.any()) for values in token_advantages(samples, settings))


def compares_groups(settings: ScoringSettings) -> bool:
    """Returns whether the baseline is computed from the group, which then needs at least two samples."""
    match settings.advantage:
        case GaeAdvantage() | NoAdvantage():
            return False
        case ReinforcePpAdvantage(baseline=baseline):
            return baseline == "group"
        case _:
            return True


def centred(values_S: Floats, groups: Sequence[Hashable], *, std: str = "none") -> Floats:
    """Subtracts the mean of each group, and divides by nothing, the group's standard deviation, or that of all values.

    A group whose values are all equal gives exactly 0.

    Source: GRPO (arXiv:2402.03300) equation 3 and 4.1.2 (`group`); Dr. GRPO (arXiv:2503.20783) (`none`); the batch's
    standard deviation as in Lite PPO (arXiv:2508.08221) and ScaleRL (arXiv:2510.13786) (`batch`).
    """
    result_S = np.zeros_like(values_S)
    batch_std = float(values_S.std()) if len(values_S) else 0.0
    for members in _members(groups):
        own = values_S[members]
        if np.all(own == own[0]):
            continue
        scale = {"none": 1.0, "group": float(own.std()) + STD_EPSILON, "batch": batch_std + STD_EPSILON}[std]
        result_S[members] = (own - own.mean()) / scale
    return result_S


def leave_one_out(rewards_S: Floats, groups: Sequence[Hashable]) -> Floats:
    """Subtracts from each reward the mean of the others of its group; 0 for a group of one.

    Source: RLOO (arXiv:2402.14740), which is G / (G - 1) times the centred reward.
    """
    result_S = centred(rewards_S, groups)
    for members in _members(groups):
        if len(members) > 1:
            result_S[members] *= len(members) / (len(members) - 1)
    return result_S


def length_weighted(rewards_S: Floats, tokens_S: Sequence[int], groups: Sequence[Hashable]) -> Floats:
    """Subtracts the mean of the group's rewards weighted by length, b = sum |o| R / sum |o|.

    Source: OPO (arXiv:2505.23585), the simplified optimal baseline.
    """
    result_S, lengths_S = np.zeros_like(rewards_S), np.asarray(tokens_S, dtype=np.float64)
    for members in _members(groups):
        own = rewards_S[members]
        if not np.all(own == own[0]):
            result_S[members] = own - np.average(own, weights=lengths_S[members])
    return result_S


def relative(rewards_S: Floats, groups: Sequence[Hashable]) -> Floats:
    """Divides the centred rewards by the group's mean: rare successes count more.

    Source: MaxRL, "Maximum likelihood reinforcement learning" (2026).

    Raises:
        ValueError: if a reward is below 0, where the mean has no such meaning.
    """
    if np.any(rewards_S < 0):
        raise ValueError("maxrl needs rewards of 0 or more.")
    result_S = centred(rewards_S, groups)
    for members in _members(groups):
        if result_S[members].any():
            result_S[members] /= rewards_S[members].mean()
    return result_S


def whitened(values_S: Floats, weights_S: Floats | None = None) -> Floats:
    """Standardises values to mean 0 and standard deviation 1; exactly 0 if all are equal. Weights are frequencies."""
    if not len(values_S) or np.all(values_S == values_S[0]):
        return np.zeros_like(values_S)
    mean = np.average(values_S, weights=weights_S)
    std = np.sqrt(np.average(np.square(values_S - mean), weights=weights_S))
    return np.asarray((values_S - mean) / (std + STD_EPSILON), dtype=np.float64)


def discounted_sums(rewards_N: Floats, gamma: float) -> Floats:
    """Computes G_t = r_t + gamma G_(t+1): Sutton and Barto (2018), equation 3.9."""
    returns_N = np.empty_like(rewards_N)
    after = 0.0
    for position in range(len(rewards_N) - 1, -1, -1):
        after = float(rewards_N[position]) + gamma * after
        returns_N[position] = after
    return returns_N


def _by_sample(samples: Sequence[Sample], settings: ScoringSettings) -> Floats:
    """Computes one number for each sample."""
    weights, groups = settings.rewards.weights, [s.group for s in samples]
    rewards_S = np.array([s.total(weights) for s in samples], dtype=np.float64)
    overlong_S = np.array([s.overlong for s in samples], dtype=np.float64)
    match settings.advantage:
        case GroupAdvantage() if settings.rewards.normalise == "gdpo":
            return _gdpo(samples, weights or {}, groups) + centred(overlong_S, groups)
        case GroupAdvantage(std=std):
            return centred(rewards_S, groups, std=std)
        case RlooAdvantage():
            return leave_one_out(rewards_S, groups)
        case OpoAdvantage():
            return length_weighted(rewards_S, [s.tokens for s in samples], groups)
        case MaxRlAdvantage():
            return relative(rewards_S - overlong_S, groups) + centred(overlong_S, groups)
        case ReinforcePpAdvantage() | GaeAdvantage() | NoAdvantage():
            raise AssertionError("these are computed by token")


def _gdpo(samples: Sequence[Sample], weights: Mapping[str, float], groups: Sequence[Hashable]) -> Floats:
    """Normalises every dimension within its group, adds them up, and whitens over the batch.

    Source: GDPO (arXiv:2601.05242).
    """
    names = dict.fromkeys(name for s in samples for name in s.rewards)
    parts = [
        _weight(weights, name) * centred(np.array([s.rewards.get(name, 0.0) for s in samples]), groups, std="group")
        for name in names
    ]
    return whitened(np.sum(parts, axis=0))


def _reinforce_pp(
    samples: Sequence[Sample], settings: ScoringSettings, advantage: ReinforcePpAdvantage
) -> list[Floats]:
    """Computes the return of every token and whitens over all tokens of the batch.

    Source: REINFORCE++ (arXiv:2501.03262); its KL term comes as penalties. The baseline variant subtracts the group's
    mean of what was earned first.
    """
    if advantage.baseline == "group":
        totals = np.array([s.earned(settings.rewards.weights) for s in samples], dtype=np.float64)
        samples = [
            replace(s, rewards={UNWEIGHTED: float(value)}, overlong=0.0)
            for s, value in zip(samples, centred(totals, [s.group for s in samples]), strict=True)
        ]
    returns = [discounted_sums(_token_rewards(s, settings), advantage.gamma) for s in samples]
    flat = whitened(np.concatenate(returns))
    return np.split(flat, np.cumsum([s.tokens for s in samples])[:-1])


def _token_rewards(sample: Sample, settings: ScoringSettings) -> Floats:
    """Puts the rewards at the last token of what earned them, the steps or the whole sample, and penalties where they are."""
    rewards_N = np.zeros(sample.tokens)
    if isinstance(settings.credit, StepReturnCredit):
        ends = np.cumsum([step.tokens for step in sample.steps])
        for end, step in zip(ends, sample.steps, strict=True):
            rewards_N[end - 1] += step.reward
    elif sample.tokens:
        rewards_N[-1] = sample.earned(settings.rewards.weights)
    return rewards_N - np.asarray(sample.penalties) if sample.penalties else rewards_N


def _by_step(samples: Sequence[Sample], values_S: Floats) -> list[Floats]:
    per_sample = np.split(values_S, np.cumsum([len(s.steps) for s in samples])[:-1])
    return [np.repeat(values, [step.tokens for step in s.steps]) for s, values in zip(samples, per_sample, strict=True)]


def _step_return(samples: Sequence[Sample], advantage: GroupAdvantage, credit: StepReturnCredit) -> Floats:
    """Centres the credit of steps: process supervision as in GRPO (arXiv:2402.03300) section 4.1.3."""
    steps = [(s.group, step) for s in samples for step in s.steps]
    credit_S, groups = np.array([step.credit for _, step in steps], dtype=np.float64), [group for group, _ in steps]
    if credit.baseline == "group":
        return centred(credit_S, groups, std=advantage.std)
    by_unit = [(group, step.unit) for group, step in steps]
    alone = {key for key, members in zip(dict.fromkeys(by_unit), _members(by_unit), strict=True) if len(members) == 1}
    over_group_S, over_unit_S = centred(credit_S, groups), centred(credit_S, by_unit)
    centred_S = np.where([key in alone for key in by_unit], over_group_S, over_unit_S)
    return _scaled(centred_S, credit_S, groups, advantage.std)


def _step_groups(samples: Sequence[Sample], advantage: GroupAdvantage) -> Floats:
    """Centres returns over the steps that began alike: GiGPO (arXiv:2505.10978), the step part."""
    steps = [(s.group, step) for s in samples for step in s.steps]
    returns_S = np.array([step.credit for _, step in steps], dtype=np.float64)
    return centred(returns_S, [(group, step.anchor) for group, step in steps], std=advantage.std)


def _scaled(centred_S: Floats, values_S: Floats, groups: Sequence[Hashable], std: str) -> Floats:
    if std == "batch":
        return centred_S / (float(values_S.std()) + STD_EPSILON)
    if std == "group":
        for members in _members(groups):
            centred_S[members] /= float(values_S[members].std()) + STD_EPSILON
    return centred_S


def _weight(weights: Mapping[str, float] | None, name: str) -> float:
    return 1.0 if weights is None or name == UNWEIGHTED else weights[name]


def _members(groups: Sequence[Hashable]) -> list[list[int]]:
    """Lists the positions of each group, in order of first appearance."""
    found: dict[Hashable, list[int]] = {}
    for position, group in enumerate(groups):
        found.setdefault(group, []).append(position)
    return list(found.values())


def _check(samples: Sequence[Sample]) -> None:
    if not samples:
        raise ValueError("Advantages need at least one sample.")
    if len({s.key for s in samples}) != len(samples):
        raise ValueError("Two samples have the same key.")
    for sample in samples:
        numbers = [
            *sample.rewards.values(),
            sample.overlong,
            *(x for step in sample.steps for x in (step.reward, step.credit)),
        ]
        if not np.all(np.isfinite(numbers)):
            raise ValueError(f"Sample {sample.key!r} has a reward that is not finite.")
        if sample.steps and sum(step.tokens for step in sample.steps) != sample.tokens:
            raise ValueError(f"The steps of sample {sample.key!r} do not add up to its tokens.")
