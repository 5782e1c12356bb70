"""How many tokens a call will use, or used, where nobody says."""

from __future__ import annotations

from typing import Final

from fulmen_llm_proxy.apis.api import CallRequest
from fulmen_llm_proxy.apis.collected import Collected
from fulmen_llm_proxy.apis.usage import MAX_TOKENS, TokenCounts

BYTES_PER_TOKEN: Final = 4
"""Of JSON with English text, about; the tokenizers of models differ by less than what is in the text."""

_NOTHING: Final = TokenCounts(prompt=0, completion=0)


def tokens_to_reserve(request: CallRequest, *, assumed_completion: int) -> int:
    """Returns how many tokens a call reserves: its prompt, by its bytes, and what it may sample at most.

    Args:
        assumed_completion: what a call may sample that does not say it.
    """
    if not request.api.is_metered:
        return 0
    completion = assumed_completion if request.max_tokens is None else min(max(0, request.max_tokens), MAX_TOKENS)
    return _prompt(request) + completion


def used(request: CallRequest, counts: TokenCounts | None, collected: Collected | None) -> TokenCounts:
    """Returns what a call used: as the backend says; estimated where it began to answer and does not say.

    A caller that hangs up before the usage comes has its tokens counted all the same.
    """
    if not request.api.is_metered or collected is None:
        return _NOTHING
    if counts is not None and counts.prompt is not None:
        return counts
    pieces = collected.payloads
    # An event of a stream has about one token.
    completion = len(pieces) if collected.streamed else sum(map(len, pieces)) // BYTES_PER_TOKEN
    return TokenCounts(prompt=_prompt(request), completion=completion)


def _prompt(request: CallRequest) -> int:
    return sum(map(len, request.fields.values())) // BYTES_PER_TOKEN
