"""The tokens, log-probabilities and calls of one rollout, before it has an advantage."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fulmen.agent import RewardKey


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCall:
    """One model call within a sequence.

    Attributes:
        start: Position of its first sampled token in `token_ids`.
        end: One past its last.
        unit: Number of the agent step that it belongs to, from 0, over all sequences of the rollout.
    """

    start: int
    end: int
    unit: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CreditRule:
    """How the rewards of a rollout's steps become credit: as `fulmen.trajectories.CreditSettings`."""

    option: str
    gamma: float | None = None
    weights: Mapping[str, float] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CallCredits:
    """Credit assigned to the steps of a rollout.

    Attributes:
        credits: One number for each call of each sequence; 0.0 where no reward applies.
        rewards: R(u), what each unit itself earned; the final reward in the last.
    """

    credits: tuple[tuple[float, ...], ...]
    rewards: tuple[float, ...]


CreditOf = Callable[[Mapping[RewardKey, float], CreditRule], CallCredits]
"""Assigns rewards by dimension, step and span as credit to the calls of one rollout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSequence:
    """One merged sequence of a rollout; the first four have one entry per token.

    Attributes:
        token_ids: Prompt, completions and observations in order.
        loss_mask: True where the policy sampled the token.
        logprobs: Natural log-probabilities of the sampling distribution; 0.0 where the mask is false.
        policy_versions: Policy version that sampled the token; 0 where the mask is false or it is not known.
        role: Name of the agent that called; empty for the only one.
        policy: The policy that sampled it; empty if that is not known.
        model: The model name that the agent asked for; empty if that is not known.
        calls: The model calls in order; they cover exactly the sampled tokens. Empty if they are not known.
    """

    token_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    logprobs: tuple[float, ...]
    policy_versions: tuple[int, ...]
    role: str = ""
    policy: str = ""
    model: str = ""
    calls: tuple[TokenCall, ...] = ()


Conversation = tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]]
"""OpenAI chat messages, and tool definitions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutTrajectory:
    """All sequences of a rollout's deciding attempt.

    Attributes:
        sequences: One or more; empty if no call was captured.
        truncated: Whether a call ended at its token limit.
        unusable: Why the rollout cannot be trained on; empty if it can.
        prompt_text: The last user message of the first call, for a person.
        answer_text: The answer of the last call, for a person.
        conversations: The messages of each sequence, its answers included, and the tools that were offered.
        credit_of: Gives credit by step; None if the calls are not known.
    """

    sequences: tuple[TokenSequence, ...]
    truncated: bool = False
    unusable: str = ""
    prompt_text: str = ""
    answer_text: str = ""
    conversations: tuple[Conversation, ...] = ()
    credit_of: CreditOf | None = field(default=None, compare=False, repr=False)
