"""Rows of stored rollouts: the sampled tokens, or the conversation tokenised again for a policy with other tokens."""

from typing import TYPE_CHECKING

from fulmen_algorithm.algorithms.sampling import supervised_rows
from fulmen_algorithm.rollouts.trajectory import RolloutTrajectory
from fulmen_algorithm.runs.failure import RunFailed
from fulmen_algorithm.training.rows import Row, sft_row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def imitable_rows(
    tokenizer: "PreTrainedTokenizerBase", name: str, trajectory: RolloutTrajectory
) -> tuple[list[Row], bool]:
    """Builds the rows of a usable rollout.

    The rows have the sampled tokens if the tokenizer maps them to the same text; else the conversation is tokenised
    again with the policy's chat template.

    Returns:
        The rows, and whether they were tokenised again.

    Raises:
        RunFailed: if the conversation cannot be tokenised again.
    """
    if _reads(tokenizer, trajectory):
        return supervised_rows(name, trajectory), False
    try:
        told = [
            sft_row(tokenizer, messages, row_id=name, tools=tools or None)
            for messages, tools in trajectory.conversations
        ]
    except ValueError as error:
        raise RunFailed(f"{name} cannot be tokenised again: {error}") from error
    return told, True


def _reads(tokenizer: "PreTrainedTokenizerBase", trajectory: RolloutTrajectory) -> bool:
    """Returns whether the tokenizer maps the sampled tokens to the text of the answer."""
    last = trajectory.sequences[-1]
    if max(last.token_ids) >= len(tokenizer):
        return False
    sampled = [token for token, trains in zip(last.token_ids, last.loss_mask, strict=True) if trains]
    return trajectory.answer_text.strip() in tokenizer.decode(sampled, skip_special_tokens=True)
