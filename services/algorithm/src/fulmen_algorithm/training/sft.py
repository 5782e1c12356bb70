"""Supervised rows: exactly the tokens that the policy itself would have sampled train.

That is, in a conversation rendered by the chat template, everything an assistant turn adds after its generation prompt,
up to and including the end-of-turn token; what the template appends after it does not train.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fulmen_algorithm.training.rows import NO_VERSION, Row, spread_advantage

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def sft_row(
    tokenizer: "PreTrainedTokenizerBase",
    messages: Sequence[Mapping[str, Any]],
    *,
    row_id: str,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> Row:
    """Turns one demonstration into a row whose mask covers the assistant's tokens.

    Args:
        tokenizer: Has a chat template whose renderings extend each other by token prefix.
        messages: OpenAI chat messages with at least one assistant message.
        row_id: Becomes the row's `rollout_id`.
        tools: OpenAI tool definitions, passed on to the template.

    Raises:
        ValueError: if no message is the assistant's, or the template breaks the prefix property, so that the
            assistant's tokens cannot be told from the others.
    """
    token_ids = _render(tokenizer, messages, tools, generation=False)
    mask = [False] * len(token_ids)
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = _render(tokenizer, messages[:index], tools, generation=True)
        through = _render(tokenizer, messages[: index + 1], tools, generation=False)
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
