"""The scalar head of a reward model: how much likelier one token is than another after the answer.

A reward model is a causal language model. Its score of an answer is log p(good | answer) - log p(bad | answer), the
tokens being those of "1" and "0". The normalisation cancels out, so the score is (w_good - w_bad) · h: a linear head
without bias on the last hidden state, as in Ouyang et al. 2022 (arXiv:2203.02155), whose weight is the difference of two
rows of the output layer. So everything that trains, shards, publishes and loads a policy does so with a reward model.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from fulmen_algorithm.runs.failure import RunFailed
from fulmen_algorithm.training.rows import NO_VERSION, Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GOOD, BAD = "1", "0"
"""Texts whose tokens are compared."""
MARK = 1
"""Tokens that a row has beyond the answer."""


def score_tokens(tokenizer: "PreTrainedTokenizerBase") -> tuple[int, int]:
    """Returns the ids of the two tokens that are compared, the good one first.

    Raises:
        RunFailed: if the tokenizer has no two such tokens.
    """
    # Some tokenizers put a token of a space before the first character.
    good, bad = (tokenizer.encode(text, add_special_tokens=False)[-1:] for text in (GOOD, BAD))
    if not good or not bad or good == bad or tokenizer.unk_token_id in (*good, *bad):
        raise RunFailed(
            f"A reward model compares the tokens of {GOOD!r} and {BAD!r}, but the tokenizer does not have them."
        )
    return good[0], bad[0]


def score_rows(row: Row, tokens: tuple[int, int], *, slope: float = 0.0) -> tuple[Row, Row]:
    """Builds the two rows whose log-probabilities give the score of a row: cut after its last sampled token.

    Args:
        row: The answer with what is before it; at least one token is sampled.
        tokens: The good and the bad token.
        slope: Advantage of the good token; that of the bad one is its negative.
    """
    end = len(row.loss_mask) - row.loss_mask[::-1].index(True)
    nothing = (0.0,) * end
    good, bad = (
        replace(
            row,
            token_ids=(*row.token_ids[:end], token),
            loss_mask=(*(False,) * end, True),
            old_logprobs=(*nothing, 0.0),
            advantages=(*nothing, advantage),
            policy_versions=(NO_VERSION,) * (end + 1),
            rewards=(),
            steps=(),
            forced=(),
        )
        for token, advantage in zip(tokens, (slope, -slope), strict=True)
    )
    return good, bad


def scores_of(logprobs: Sequence[Sequence[float]]) -> list[float]:
    """Computes scores from the log-probabilities of the rows of `score_rows`, two for each."""
    last = [each[-1] for each in logprobs]
    return [good - bad for good, bad in zip(last[::2], last[1::2], strict=True)]
