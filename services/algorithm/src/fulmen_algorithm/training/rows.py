"""A row is one token sequence for training, validated once on construction.

Invariant: all per-token fields have the length of `token_ids`, and the first token never trains, since no position
predicts it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import and_, or_
from typing import TYPE_CHECKING, Any

from fulmen.routed_experts import RoutedExperts, RoutedExpertsInvalid

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NO_VERSION = -1
"""Policy version of a token that no policy sampled (prompt, observation, padding)."""


class UnknownRole(Exception):
    """A row's role has no adapter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One token sequence of one rollout, ready for training.

    Several rows may share a `rollout_id` (sub-agents, context resets); unless credit differs by step, they then share
    one advantage.

    Attributes:
        rollout_id: The rollout of the sequence; aggregation weights count rollouts by it.
        token_ids: T token ids, prompt and completion together.
        loss_mask: T flags; true where the token was sampled by the policy and trains.
        old_logprobs: T natural log-probabilities under the sampling policy; 0.0 where the mask is false.
        advantages: T numbers; 0.0 where the mask is false.
        policy_versions: T versions of the policy that sampled each token; `NO_VERSION` where the mask is false.
        group: The rollout's group; aggregation by prompt counts groups by it. Empty for a group of this rollout
            alone.
        role: Name of the sequence's agent; empty without roles.
        rewards: T rewards, for a critic that computes the advantages; 0.0 where the mask is false. Empty without one.
        steps: T numbers that order the tokens of a rollout over its rows: the agent step in which each was sampled.
            Empty if rows follow each other.
        forced: T flags; true where a token was sampled that a constraint left no alternative to, so that it does not
            train. Empty for none.
        routed_experts: Experts with which the sampler computed tokens, and with which they train; None if unknown.
    """

    rollout_id: str
    token_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    old_logprobs: tuple[float, ...]
    advantages: tuple[float, ...]
    policy_versions: tuple[int, ...]
    group: str = ""
    role: str = ""
    rewards: tuple[float, ...] = ()
    steps: tuple[int, ...] = ()
    forced: tuple[bool, ...] = ()
    routed_experts: RoutedExperts | None = None

    def __post_init__(self) -> None:
        """Checks the invariant.

        Raises:
            ValueError: if a per-token field has another length, the row is empty, the first token is marked to train,
                or a number that would train is not finite.
        """
        length = len(self.token_ids)
        if not length:
            raise ValueError("A row needs at least one token.")
        for name in ("loss_mask", "old_logprobs", "advantages", "policy_versions"):
            if len(getattr(self, name)) != length:
                raise ValueError(f"{name} has {len(getattr(self, name))} entries for {length} tokens.")
        if len(self.rewards) not in (0, length) or len(self.steps) not in (0, length):
            raise ValueError(f"rewards and steps need one entry per token ({length}).")
        if len(self.forced) not in (0, length) or any(map(and_, self.forced, self.loss_mask)):
            raise ValueError("forced needs one entry per token, and no forced token trains.")
        if self.routed_experts is not None and self.routed_experts.spans and self.routed_experts.spans[-1][1] > length:
            raise RoutedExpertsInvalid(f"There are experts of {self.routed_experts.spans[-1][1]} tokens for {length}.")
        if self.loss_mask[0]:
            raise ValueError("The first token of a row has no prediction and cannot train.")
        if not all(map(math.isfinite, (*self.old_logprobs, *self.advantages, *self.rewards))):
            raise ValueError(f"Row of rollout {self.rollout_id!r} contains a number that is not finite.")
        if any(advantage and not trains for advantage, trains in zip(self.advantages, self.loss_mask, strict=True)):
            raise ValueError(f"Row of rollout {self.rollout_id!r} has an advantage at a token that does not train.")

    @property
    def trained_tokens(self) -> int:
        """Number of tokens that train."""
        return sum(self.loss_mask)


def calls_per_rollout(rows: Sequence[Row]) -> float:
    """Returns the mean number of model calls of the rollouts of some rows: of their stretches of sampled tokens."""
    masks = [tuple(map(or_, row.loss_mask, row.forced)) if row.forced else row.loss_mask for row in rows]
    stretches = sum(
        sampled and not before for mask in masks for before, sampled in zip((False, *mask), mask, strict=False)
    )
    return stretches / max(len({row.rollout_id for row in rows}), 1)


def spread_advantage(advantage: float, loss_mask: Sequence[bool]) -> tuple[float, ...]:
    """Assigns the same advantage to every trained token."""
    return tuple(advantage if trains else 0.0 for trains in loss_mask)


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

    Every token of the completion has the same advantage.

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
        advantages=(0.0,) * prompt_length + (advantage,) * completion_length,
        policy_versions=(NO_VERSION,) * prompt_length + (version,) * completion_length,
    )


def sft_row(
    tokenizer: "PreTrainedTokenizerBase",
    messages: Sequence[Mapping[str, Any]],
    *,
    row_id: str,
    tools: Sequence[Mapping[str, Any]] | None = None,
    first_trained: int = 0,
) -> Row:
    """Turns one demonstration into a row in which exactly the tokens that the policy itself would have sampled train.

    These are the tokens that an assistant turn adds after its generation prompt, up to and including the end-of-turn
    token. Tokens that the chat template appends after it do not train.

    Args:
        tokenizer: Has a chat template whose renderings extend each other by token prefix.
        messages: OpenAI chat messages with at least one assistant message.
        row_id: Becomes the row's `rollout_id`.
        tools: OpenAI tool definitions for the template.
        first_trained: Index of the first message that may train; earlier ones are context.

    Raises:
        ValueError: if no message is the assistant's, or the template breaks the prefix property, so that the
            assistant's tokens cannot be distinguished from the others.
    """
    token_ids = _render(tokenizer, messages, tools, generation=False)
    mask = [False] * len(token_ids)
    for index, message in enumerate(messages):
        if message["role"] != "assistant" or index < first_trained:
            continue
        prompt = _render(tokenizer, messages[:index], tools, generation=True)
        last = index + 1 == len(messages)
        through = token_ids if last else _render(tokenizer, messages[: index + 1], tools, generation=False)
        if through[: len(prompt)] != prompt or token_ids[: len(through)] != through:
            raise ValueError(f"Message {index}: the chat template does not extend its own rendering token by token.")
        end = _end_of_turn(through, len(prompt), tokenizer.eos_token_id)
        mask[len(prompt) : end] = [True] * (end - len(prompt))
    if not any(mask):
        raise ValueError(f"Demonstration {row_id!r} has no assistant message.")
    return Row(
        rollout_id=row_id,
        token_ids=tuple(token_ids),
        loss_mask=tuple(mask),
        old_logprobs=(0.0,) * len(token_ids),
        advantages=spread_advantage(1.0, mask),
        policy_versions=(NO_VERSION,) * len(token_ids),
    )


def _render(
    tokenizer: "PreTrainedTokenizerBase",
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    *,
    generation: bool,
) -> list[int]:
    ids: list[int] = tokenizer.apply_chat_template(
        [dict(m) for m in messages],
        tools=None if tools is None else [dict(t) for t in tools],
        add_generation_prompt=generation,
        tokenize=True,
        return_dict=False,
    )  # type: ignore[assignment]  # one conversation, tokenised, gives a list of ids
    return ids


def _end_of_turn(token_ids: Sequence[int], start: int, eos_token_id: int | None) -> int:
    """Finds the end of a turn that starts at `start`: behind its last end-of-turn token, or the end of the text."""
    for position in range(len(token_ids) - 1, start - 1, -1):
        if token_ids[position] == eos_token_id:
            return position + 1
    return len(token_ids)
