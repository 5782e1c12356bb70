"""Reference implementations of the objectives: numpy in float64, row by row, as the papers write them.

Nothing here is shared with what is tested but the numbers in the settings. Where a paper stops a gradient, the value of
`held` (log-probabilities of the same tokens that do not move) stands in, so that finite differences see the same gradient.
"""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from fulmen_algorithm.losses.objectives import Correction, Kl, Loss, Objective


@dataclass(frozen=True, kw_only=True)
class Sample:
    """The trained tokens of one row: log-probabilities of each policy, and advantages."""

    rollout: str
    group: str
    pi: np.ndarray
    proximal: np.ndarray
    mu: np.ndarray
    reference: np.ndarray
    advantages: np.ndarray


def objective_value(samples: list[Sample], objective: Objective, held: list[np.ndarray] | None = None) -> float:
    """The number to minimise; rows without a trained token are no part of it."""
    held = [h for h in held or [s.pi for s in samples] if len(h)]
    samples = [s for s in samples if len(s.pi)]
    terms = [
        loss(s, objective.loss, h) * correction(s, objective.correction) + penalty(s, objective.kl)
        for s, h in zip(samples, held, strict=True)
    ]
    return aggregate(samples, terms, objective)


def loss(s: Sample, settings: Loss, held: np.ndarray) -> np.ndarray:
    """Minus the surrogate of each token."""
    ratio, advantages = np.exp(s.pi - s.proximal), s.advantages
    match settings.kind:
        case "clip":  # PPO eq. 7 with the bounds of DAPO eq. 8
            value = clipped_surrogate(ratio, advantages, settings.low, settings.high)
            if settings.dual_clip is not None:  # arXiv:1912.09729: max(min(r A, clip(r) A), c A) where A < 0
                floor = settings.dual_clip * advantages
                value = np.where(advantages < 0, np.maximum(value, floor), value)
            return -value
        case "gspo":
            mean = np.mean(s.pi - s.proximal)  # eq. 7: s = (prod r)^(1/|y|)
            if settings.form == "token":  # eq. 14: sg[s] pi / sg[pi]
                mean = np.mean(held - s.proximal) + s.pi - held
            return -clipped_surrogate(np.exp(mean) * np.ones_like(s.pi), advantages, settings.low, settings.high)
        case "cispo":  # MiniMax-M1 eq. 4 and 5
            weight = np.minimum(np.maximum(np.exp(held - s.proximal), settings.ratio_min), settings.ratio_max)
            return -weight * advantages * s.pi
        case "sapo":
            tau = np.array([settings.tau_positive if a > 0 else settings.tau_negative for a in advantages])
            return -advantages * 4 / tau / (1 + np.exp(-tau * (ratio - 1)))
        case "reinforce":
            return -advantages * s.pi
        case "importance":
            return -np.exp(s.pi - s.mu) * advantages
        case "dppo":
            moved = np.exp(held) - np.exp(s.mu)
            kept = np.array(
                [m <= settings.high if a > 0 else m >= -settings.low for m, a in zip(moved, advantages, strict=True)]
            )
            return -1.0 * kept * ratio * advantages
        case other:
            raise AssertionError(other)


def clipped_surrogate(ratio: np.ndarray, advantages: np.ndarray, low: float, high: float) -> np.ndarray:
    """min(r A, clip(r, 1 - low, 1 + high) A) of each token."""
    pairs = zip(ratio, advantages, strict=True)
    return np.array([min(r * a, min(max(r, 1 - low), 1 + high) * a) for r, a in pairs])


def correction(s: Sample, settings: Correction) -> np.ndarray:
    """What each token counts."""
    weight, product = np.exp(s.proximal - s.mu), float(np.prod(np.exp(s.proximal - s.mu)))
    everyone = np.ones_like(weight)
    match settings.kind:
        case "none":
            return everyone
        case "token":
            return np.array([min(w, settings.cap) for w in weight])
        case "sequence":
            return everyone * min(product, settings.cap)
        case "sequence_mask":
            return everyone * (product if product <= settings.cap else 0.0)
        case "geometric":
            mean = product ** (1 / len(weight))
            return everyone * (settings.low <= mean <= settings.high)
        case "icepop":
            return np.array([w if settings.low <= w <= settings.high else 0.0 for w in weight])
        case "decoupled":  # AReaL eq. 5: the weight goes before the clipped ratio against the proximal policy
            return np.array([w if settings.cap is None or w <= settings.cap else 0.0 for w in weight])
        case other:
            raise AssertionError(other)


def penalty(s: Sample, settings: Kl) -> np.ndarray:
    """Coefficient times Schulman's estimate of KL(pi || reference), in terms of the probability ratio q / p."""
    if settings.kind != "loss":
        return np.zeros_like(s.pi)
    ratio = np.exp(s.reference) / np.exp(s.pi)
    estimates = {"k1": -np.log(ratio), "k2": np.log(ratio) ** 2 / 2, "k3": ratio - 1 - np.log(ratio)}
    weight = np.exp(s.pi) / np.exp(s.proximal) if settings.weighted else 1.0
    return settings.coefficient * weight * estimates[settings.estimator.value]


def aggregate(samples: list[Sample], terms: list[np.ndarray], objective: Objective) -> float:
    """Means of means, as nested sums."""
    full = list(zip(samples, terms, strict=True))
    match objective.aggregation.kind:
        case "token_mean":
            return float(np.concatenate([t for _, t in full]).mean())
        case "per_rollout_mean":
            return _mean_of_means([(s.rollout, t) for s, t in full])
        case "prompt_mean":
            return _mean_of_means([(s.group, t) for s, t in full])
        case "sequence_mean_token_mean":  # GRPO eq. 3
            return float(np.mean([t.mean() for _, t in full]))
        case "sequence_mean_token_sum_norm":  # Dr. GRPO, listing 1
            return float(np.mean([t.sum() / objective.aggregation.length for _, t in full]))
        case other:
            raise AssertionError(other)


def _mean_of_means(parts: list[tuple[str, np.ndarray]]) -> float:
    units: dict[str, list[np.ndarray]] = defaultdict(list)
    for unit, terms in parts:
        units[unit].append(terms)
    return float(np.mean([np.concatenate(unit).mean() for unit in units.values()]))


def has_bend(samples: list[Sample], objective: Objective, *, within: float = 1e-5) -> bool:
    """Whether a clip begins so near to a ratio that finite differences would see both of its sides."""
    settings = objective.loss
    if settings.kind not in ("clip", "gspo"):
        return False
    bounds = np.array([1 - settings.low, 1 + settings.high, getattr(settings, "dual_clip", None) or np.inf])
    moved = [s.pi - s.proximal for s in samples if len(s.pi)]
    ratios = np.exp(np.concatenate(moved) if settings.kind == "clip" else [np.mean(each) for each in moved])
    return bool((np.abs(ratios[:, None] - bounds) < within).any())


def gradient(samples: list[Sample], objective: Objective, *, step: float = 1e-6) -> list[np.ndarray]:
    """Central finite differences of `objective_value` by each log-probability under pi."""
    held = [s.pi for s in samples]
    slopes = []
    for index, sample in enumerate(samples):
        slopes.append(np.zeros_like(sample.pi))
        for at in range(len(sample.pi)):
            values = []
            for sign in (1, -1):
                moved = sample.pi.copy()
                moved[at] += sign * step
                changed = [*samples[:index], Sample(**{**vars(sample), "pi": moved}), *samples[index + 1 :]]
                values.append(objective_value(changed, objective, held))
            slopes[-1][at] = (values[0] - values[1]) / (2 * step)
    return slopes
