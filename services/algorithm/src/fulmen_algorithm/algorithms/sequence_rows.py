"""Converts a sampled sequence to a training row: the sampled tokens themselves, never tokenised again."""

from fulmen_algorithm.rollouts.trajectory import TokenSequence
from fulmen_algorithm.training.rows import NO_VERSION, Row


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
        advantages: One for each token.
        versions: Of the policy that sampled each token; None: it does not matter which.
        group: Of the rollout; empty: it is none's.
        rewards: For a critic; empty without one.
        steps: Likewise.
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
