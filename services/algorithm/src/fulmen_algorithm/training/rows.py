"""A row is one token sequence that trains: whatever it holds was checked once, here, when it was made.

Invariant: all per-token fields have the length of `token_ids`, and the first token never trains, because no position
predicts it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

NO_VERSION = -1
"""Policy version of a token that no policy sampled (prompt, observation, padding)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One token sequence of one rollout, ready for training.

    Several rows may share a `rollout_id` (sub-agents, context resets); they then share one advantage.

    Attributes:
        rollout_id: The rollout that the sequence comes from; aggregation weights count rollouts by it.
        token_ids: T token ids, prompt and completion together.
        loss_mask: T flags; true where the token was sampled by the policy and trains.
        old_logprobs: T natural log-probabilities under the sampling policy; 0.0 where the mask is false.
        advantage: One number for the whole rollout, in units of reward.
        policy_versions: T versions of the policy that sampled each token; `NO_VERSION` where the mask is false.
    """

    rollout_id: str
    token_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    old_logprobs: tuple[float, ...]
    advantage: float
    policy_versions: tuple[int, ...]

    def __post_init__(self) -> None:
        """Checks the invariant.

        Raises:
            ValueError: if a per-token field has another length, the row is empty, the first token is marked to train,
                or a number that would train is not finite.
        """
        length = len(self.token_ids)
        if not length:
            raise ValueError("A row needs at least one token.")
        for name in ("loss_mask", "old_logprobs", "policy_versions"):
            if len(getattr(self, name)) != length:
                raise ValueError(f"{name} has {len(getattr(self, name))} entries for {length} tokens.")
        if self.loss_mask[0]:
            raise ValueError("The first token of a row has no prediction and cannot train.")
        if not math.isfinite(self.advantage) or not all(map(math.isfinite, self.old_logprobs)):
            raise ValueError(f"Row of rollout {self.rollout_id!r} holds a number that is not finite.")

    @property
    def trained_tokens(self) -> int:
        """Number of tokens that train."""
        return sum(self.loss_mask)


def row_from_completion(
    *,
    rollout_id: str,
    prompt_ids: Sequence[int],
    completion_ids: Sequence[int],
    logprobs: Sequence[float],
    advantage: float,
    version: int,
) -> Row:
    """Builds the row of a single model call whose completion was sampled by one policy version.

    Raises:
        ValueError: if the prompt is empty, or ids and log-probabilities differ in number.
    """
    if not prompt_ids:
        raise ValueError("A completion needs a prompt of at least one token.")
    prompt_length, completion_length = len(prompt_ids), len(completion_ids)
    return Row(
        rollout_id=rollout_id,
        token_ids=(*prompt_ids, *completion_ids),
        loss_mask=(False,) * prompt_length + (True,) * completion_length,
        old_logprobs=(0.0,) * prompt_length + tuple(logprobs),
        advantage=advantage,
        policy_versions=(NO_VERSION,) * prompt_length + (version,) * completion_length,
    )
