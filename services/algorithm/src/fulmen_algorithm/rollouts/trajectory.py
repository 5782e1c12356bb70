"""The tokens, log-probabilities and calls of one rollout, before advantages."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fulmen.agent import RewardKey
from fulmen.routed_experts import RoutedExperts


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCall:
    """One model call within a sequence.

    Attributes:
        start: Position of its first sampled token in `token_ids`.
        end: One past its last sampled token.
        unit: Index of its agent step, from 0, over all sequences of the rollout.
        constrained: Whether the request restricted what could be sampled, such as by `response_format`.
    """

    start: int
    end: int
    unit: int
    constrained: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CreditRule:
    """How step rewards become credit; see `fulmen.trajectories.CreditSettings`."""

    option: str
    gamma: float | None = None
    weights: Mapping[str, float] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CallCredits:
    """Credit assigned to the steps of a rollout.

    Attributes:
        credits: One number per call of each sequence; 0.0 where no reward applies.
        rewards: R(u), the reward of each unit; the last one includes the final reward.
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
        policy_versions: Policy version that sampled the token; 0 where the mask is false or the version is unknown.
        role: Name of the calling agent; empty if there is only one.
        policy: The policy that sampled it; empty if unknown.
        model: The model name used by the agent; empty if unknown.
        calls: The model calls in order; they cover exactly the sampled tokens. Empty if unknown.
        routed_experts: Experts with which the sampler computed tokens; None if unknown.
    """

    token_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    logprobs: tuple[float, ...]
    policy_versions: tuple[int, ...]
    role: str = ""
    policy: str = ""
    model: str = ""
    calls: tuple[TokenCall, ...] = ()
    routed_experts: RoutedExperts | None = None

    @property
    def forced(self) -> tuple[bool, ...]:
        """True where a constraint left one token to choose from; empty if no call is constrained.

        The engine's log-probability is that of the constrained distribution, and so exactly 0 there.
        """
        constrained = [range(call.start, call.end) for call in self.calls if call.constrained]
        if not constrained:
            return ()
        found = [False] * len(self.token_ids)
        for position in (position for call in constrained for position in call):
            found[position] = self.loss_mask[position] and self.logprobs[position] == 0.0
        return tuple(found)

    def gaps(self, others: Sequence[float]) -> list[float]:
        """Computes log mu - log other of each sampled token, and 0 of the others, mu being the sampler.

        Args:
            others: Natural log-probability of each token under another policy.
        """
        tokens = zip(self.loss_mask, self.logprobs, others, strict=True)
        return [mu - other if sampled else 0.0 for sampled, mu, other in tokens]


Conversation = tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]]
"""OpenAI chat messages, and tool definitions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutTrajectory:
    """All sequences of a rollout's deciding attempt.

    Attributes:
        sequences: One or more; empty if no call was captured.
        truncated: Whether a call ended at its token limit.
        unusable: Reason why the rollout cannot be trained on; empty if it can.
        prompt_text: The last user message of the first call, for display.
        answer_text: The answer of the last call, for display.
        conversations: The messages of each sequence, answers included, and the offered tools.
        credit_of: Assigns credit by step; None if the calls are unknown.
    """

    sequences: tuple[TokenSequence, ...]
    truncated: bool = False
    unusable: str = ""
    prompt_text: str = ""
    answer_text: str = ""
    conversations: tuple[Conversation, ...] = ()
    credit_of: CreditOf | None = field(default=None, compare=False, repr=False)
