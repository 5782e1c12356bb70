"""How far the engine's log-probabilities are from the trainer's, for the same tokens under the same weights.

Invariant: only rows sampled entirely by the version being trained count, and only before the first optimiser step on
them; so the difference is due to the two programs and not to training.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fulmen_algorithm.training.rows import Row

ROWS = 8
"""Number of rows computed only for the comparison, where training needs no pass over all of them."""
LARGEST_EXPONENT = 80.0


@dataclass(slots=True, kw_only=True)
class RoutingDifferences:
    """How often the trainer's own choice is another set of experts than the engine's.

    Attributes:
        choices: Choices of a token in a layer that were compared.
        other_choices: Those with another set of experts.
        tokens: Tokens that were compared.
        other_tokens: Those with another set of experts in any layer.
    """

    choices: int = 0
    other_choices: int = 0
    tokens: int = 0
    other_tokens: int = 0


def is_fresh(row: Row, *, current_version: int) -> bool:
    """Returns whether the present version sampled every sampled token of a row, and from its own distribution.

    Of a constrained call the engine reports the log-probabilities of the constrained distribution.
    """
    if any(row.forced):
        return False
    pairs = zip(row.loss_mask, row.policy_versions, strict=True)
    return row.trained_tokens > 0 and all(version == current_version for sampled, version in pairs if sampled)


def engine_mismatch(rows: Sequence[Row], logprobs: Sequence[Sequence[float]]) -> dict[str, float]:
    """Compares the engine's log-probabilities with the trainer's; empty without a token to compare.

    KL(engine || trainer) in nats per token by k3 = e^d - d - 1 with d = trainer - engine, which is never negative and
    has the KL as its mean over tokens that the engine sampled (J. Schulman, "Approximating KL divergence", 2020).

    Args:
        rows: Fresh rows.
        logprobs: The trainer's log-probability of each token of each row, at the temperature of the sampling.
    """
    deltas = [
        trainer - engine
        for row, computed in zip(rows, logprobs, strict=True)
        for sampled, engine, trainer in zip(row.loss_mask, row.old_logprobs, computed, strict=True)
        if sampled
    ]
    if not deltas:
        return {}
    sizes = [abs(delta) for delta in deltas]
    return {
        "engine_mismatch_kl": sum(math.exp(min(d, LARGEST_EXPONENT)) - d - 1 for d in deltas) / len(deltas),
        "engine_mismatch_logprob_mean": sum(sizes) / len(sizes),
        "engine_mismatch_logprob_max": max(sizes),
        "engine_mismatch_tokens": float(len(deltas)),
    }


def routing_mismatch(rows: Sequence[Row], found: Sequence[RoutingDifferences]) -> dict[str, float]:
    """Returns the shares of tokens, and of choices of a token in a layer, for which engine and trainer choose other experts.

    Args:
        rows: Rows of the batch, of which the share of tokens with recorded experts is returned, too.
        found: What each rank has compared.
    """
    tokens, choices = sum(each.tokens for each in found), sum(each.choices for each in found)
    known = sum(row.routed_experts.token_count for row in rows if row.routed_experts is not None)
    return {
        "router_mismatch_tokens_share": sum(each.other_tokens for each in found) / max(tokens, 1),
        "router_mismatch_choices_share": sum(each.other_choices for each in found) / max(choices, 1),
        "router_replayed_tokens_share": known / max(sum(len(row.token_ids) for row in rows), 1),
    }
