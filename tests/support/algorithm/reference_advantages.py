"""Reference implementations of advantages: the papers' formulas in plain loops over float64, independent of Fulmen."""

import math
from collections.abc import Sequence

import numpy as np

EPSILON = 1e-6


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def std(values: Sequence[float]) -> float:
    middle = mean(values)
    return math.sqrt(mean([(v - middle) ** 2 for v in values]))


def grpo(groups: Sequence[Sequence[float]], *, scale: str) -> list[float]:
    """GRPO, arXiv:2402.03300 section 4.1.2: (r - mean) / std; Dr. GRPO, arXiv:2503.20783, leaves the division out."""
    everything = [r for group in groups for r in group]
    result = []
    for group in groups:
        by = {"none": 1.0, "group": std(group) + EPSILON, "batch": std(everything) + EPSILON}[scale]
        result += [(r - mean(group)) / by for r in group]
    return result


def rloo(groups: Sequence[Sequence[float]]) -> list[float]:
    """RLOO, arXiv:2402.14740: the reward minus the mean of the others'."""
    return [
        r - mean([other for j, other in enumerate(group) if j != i]) for group in groups for i, r in enumerate(group)
    ]


def opo(groups: Sequence[Sequence[float]], lengths: Sequence[Sequence[int]]) -> list[float]:
    """OPO, arXiv:2505.23585: b = sum |o_i| R_i / sum |o_i|."""
    result = []
    for group, tokens in zip(groups, lengths, strict=True):
        baseline = math.fsum(n * r for n, r in zip(tokens, group, strict=True)) / sum(tokens)
        result += [r - baseline for r in group]
    return result


def maxrl(groups: Sequence[Sequence[float]]) -> list[float]:
    """MaxRL: (R - mean) / mean, and 0 where all rewards are 0."""
    return [(r - mean(group)) / mean(group) if any(group) else 0.0 for group in groups for r in group]


def gdpo(groups: Sequence[Sequence[Sequence[float]]], weights: Sequence[float]) -> list[float]:
    """GDPO, arXiv:2601.05242: every dimension normalised in its group, weighted, added, whitened over the batch."""
    added = []
    for group in groups:
        columns = list(zip(*group, strict=True))
        for rewards in group:
            parts = [
                w * (r - mean(column)) / (std(column) + EPSILON)
                for w, r, column in zip(weights, rewards, columns, strict=True)
            ]
            added.append(math.fsum(parts))
    return [(a - mean(added)) / (std(added) + EPSILON) for a in added]


def reinforce_pp(rewards: Sequence[Sequence[float]], gamma: float) -> list[list[float]]:
    """REINFORCE++, arXiv:2501.03262: G_t = sum over s >= t of gamma^(s - t) r_s, whitened over all tokens."""
    returns = [
        [math.fsum(gamma ** (s - t) * row[s] for s in range(t, len(row))) for t in range(len(row))] for row in rewards
    ]
    flat = [g for row in returns for g in row]
    return [[(g - mean(flat)) / (std(flat) + EPSILON) for g in row] for row in returns]


def gae(rewards: Sequence[float], values: Sequence[float], *, gamma: float, lam: float) -> list[float]:
    """GAE, arXiv:1506.02438 equation 16: the sum over l of (gamma lambda)^l delta_(t+l), with V = 0 after the end."""
    after = [*values[1:], 0.0]
    delta = [r + gamma * v1 - v for r, v, v1 in zip(rewards, values, after, strict=True)]
    return [math.fsum((gamma * lam) ** (s - t) * delta[s] for s in range(t, len(delta))) for t in range(len(delta))]


def overlong(tokens: int, longest: int, buffer: int) -> float:
    """DAPO, arXiv:2503.14476 equation 13."""
    if tokens <= longest - buffer:
        return 0.0
    return ((longest - buffer) - tokens) / buffer if tokens <= longest else -1.0


def gigpo(groups: Sequence[Sequence[Sequence[tuple[str, float]]]], *, omega: float) -> list[list[float]]:
    """GiGPO, arXiv:2505.10978, without division: A_E + omega A_S.

    Args:
        groups: By group, by rollout, (anchor, return) of each step; the first return is taken for the rollout's.
        omega: Weight of the step's advantage.
    """
    result = []
    for group in groups:
        episodes = np.array([rollout[0][1] for rollout in group])
        for rollout, episode in zip(group, episodes, strict=True):
            row = []
            for anchor, value in rollout:
                alike = [v for other in group for a, v in other if a == anchor]
                row.append(float(episode - episodes.mean() + omega * (value - mean(alike))))
            result.append(row)
    return result
