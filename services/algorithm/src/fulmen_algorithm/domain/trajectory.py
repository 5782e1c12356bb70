"""What the policy did in one rollout, token by token, before it has an advantage."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSequence:
    """One merged sequence of a rollout; all four have one entry per token.

    Attributes:
        token_ids: Prompt, completions and observations in order.
        loss_mask: True where the policy sampled the token.
        logprobs: Natural log-probabilities of the sampling distribution; 0.0 where the mask is false.
        policy_versions: Policy version that sampled the token; 0 where the mask is false or it is not known.
    """

    token_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    logprobs: tuple[float, ...]
    policy_versions: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutTrajectory:
    """All sequences of a rollout's deciding attempt.

    Attributes:
        sequences: One or more; none if there was no captured call.
        truncated: Whether a call ended at its token limit.
        unusable: Why the rollout cannot be trained on; empty if it can.
        prompt_text: The last user message of the first call, for a person.
        answer_text: The answer of the last call, for a person.
    """

    sequences: tuple[TokenSequence, ...]
    truncated: bool = False
    unusable: str = ""
    prompt_text: str = ""
    answer_text: str = ""
