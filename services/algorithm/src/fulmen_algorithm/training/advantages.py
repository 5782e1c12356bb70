# ruff: noqa: N806 (tensor names end with their shape)
"""Advantages are computed once per rollout from whole groups; rows only inherit them.

Legend: P groups (prompts), G rollouts per group.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

STD_EPSILON = 1e-6


class StdNormalisation(StrEnum):
    """Which standard deviation the centred rewards are divided by."""

    NONE = "none"
    GROUP = "group"
    BATCH = "batch"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAdvantages:
    """Advantage of every rollout of a batch of groups.

    Attributes:
        advantages: Advantage by rollout id, in units of reward (`NONE`) or of standard deviations.
        zero_variance_groups: Keys of the groups whose rewards are all equal: they carry no signal, every advantage in
            them is exactly zero, and the caller may drop and refill them.
        mean_reward: Mean over all rollouts.
    """

    advantages: Mapping[str, float]
    zero_variance_groups: tuple[str, ...]
    mean_reward: float


def group_advantages(
    rewards: Mapping[str, Mapping[str, float]], *, std: StdNormalisation = StdNormalisation.NONE
) -> GroupAdvantages:
    """Subtracts each group's mean reward, and optionally divides by a standard deviation.

    Args:
        rewards: Reward by rollout id, by group key. Groups may differ in size.
        std: `NONE` divides by nothing, `GROUP` by the group's population standard deviation, `BATCH` by that of all
            rewards of the batch.

    Raises:
        ValueError: if there is no group, a group has fewer than two rollouts, a rollout id is in two groups, or a
            reward is not finite.

    Source: GRPO (arXiv:2402.03300); `NONE` follows Dr. GRPO (arXiv:2503.20783), `BATCH` ScaleRL (arXiv:2510.13786).
    """
    _check(rewards)
    everything = np.array([r for group in rewards.values() for r in group.values()], dtype=np.float64)
    batch_std = float(everything.std())
    advantages: dict[str, float] = {}
    flat: list[str] = []
    for key, group in rewards.items():
        rewards_G = np.array(list(group.values()), dtype=np.float64)
        if np.all(rewards_G == rewards_G[0]):
            # Exactly zero: the mean of equal floats may differ from them in the last bit.
            flat.append(key)
            advantages.update(dict.fromkeys(group, 0.0))
            continue
        centred_G = rewards_G - rewards_G.mean()
        match std:
            case StdNormalisation.GROUP:
                centred_G = centred_G / (rewards_G.std() + STD_EPSILON)
            case StdNormalisation.BATCH:
                centred_G = centred_G / (batch_std + STD_EPSILON)
            case StdNormalisation.NONE:
                pass
        advantages.update(zip(group, centred_G.tolist(), strict=True))
    return GroupAdvantages(
        advantages=advantages, zero_variance_groups=tuple(flat), mean_reward=float(everything.mean())
    )


def _check(rewards: Mapping[str, Mapping[str, float]]) -> None:
    if not rewards:
        raise ValueError("Advantages need at least one group.")
    seen: set[str] = set()
    for key, group in rewards.items():
        if len(group) < 2:
            raise ValueError(f"Group {key!r} has {len(group)} rollout(s); every advantage would be zero.")
        if not seen.isdisjoint(group):
            raise ValueError(f"Group {key!r} shares a rollout with another group.")
        if not all(np.isfinite(list(group.values()))):
            raise ValueError(f"Group {key!r} holds a reward that is not finite.")
        seen.update(group)


def split_zero_variance(groups: Sequence[str], result: GroupAdvantages) -> tuple[list[str], list[str]]:
    """Splits group keys into those that train and those that carry no signal, keeping their order."""
    flat = set(result.zero_variance_groups)
    return [g for g in groups if g not in flat], [g for g in groups if g in flat]
