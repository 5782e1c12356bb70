"""Estimates of the tokens that a call will use or has used."""

from __future__ import annotations

from typing import Final

from fulmen_llm_proxy.apis.api import CallRequest
from fulmen_llm_proxy.apis.collected import Collected
from fulmen_llm_proxy.apis.usage import MAX_TOKENS, TokenCounts

BYTES_PER_TOKEN: Final = 4
"""Rough ratio for JSON with English text; tokenizers differ less than texts do."""

_NOTHING: Final = TokenCounts(prompt=0, completion=0)


def tokens_to_reserve(request: CallRequest, *, assumed_completion: int) -> int:
    """Returns the tokens that a call reserves: its prompt, estimated from its size, and its maximum completion.

    Args:
        assumed_completion: completion tokens of a call that sets no maximum.
    """
    if not request.api.is_metered:
        return 0
    completion = assumed_completion if request.max_tokens is None else min(max(0, request.max_tokens), MAX_TOKENS)
    return _prompt(request) + completion


def used(request: CallRequest, counts: TokenCounts | None, collected: Collected | None) -> TokenCounts:
    """Returns a call's usage as the backend reports it; an estimate if an answer started without a report.

    The tokens of a caller that disconnects before the usage arrives are thus counted, too.
    """
    if not request.api.is_metered or collected is None:
        return _NOTHING
    if counts is not None and counts.prompt is not None:
        return counts
    pieces = collected.payloads
    # A stream's event has about one token.
    completion = len(pieces) if collected.streamed else sum(map(len, pieces)) // BYTES_PER_TOKEN
    return TokenCounts(prompt=_prompt(request), completion=completion)


def _prompt(request: CallRequest) -> int:
    return sum(map(len, request.fields.values())) // BYTES_PER_TOKEN
