"""Token counts of calls: as backends report them, or estimated."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from fulmen_llm_proxy.apis.api import CallRequest
from fulmen_llm_proxy.apis.collected import Collected

MAX_TOKENS: Final = 10**9
"""Maximum plausible token count of a call; larger or negative counts are rejected."""

_Tokens = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]


class _Details(msgspec.Struct):
    cached_tokens: _Tokens | None = None
    reasoning_tokens: _Tokens | None = None


class Usage(msgspec.Struct, frozen=True):
    """Token counts as reported, under the field names of all APIs.

    OpenAI's APIs include cached tokens in the prompt's count; Anthropic's do not.
    """

    prompt_tokens: _Tokens | None = None
    completion_tokens: _Tokens | None = None
    input_tokens: _Tokens | None = None
    output_tokens: _Tokens | None = None
    prompt_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None
    completion_tokens_details: _Details | None = None
    output_tokens_details: _Details | None = None
    cache_read_input_tokens: _Tokens | None = None
    cache_creation_input_tokens: _Tokens | None = None


class TokenCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of a call; None if the backend did not report them.

    Attributes:
        prompt: tokens of the prompt, including cached ones.
        cached: prompt tokens read from the backend's cache.
        cache_written: prompt tokens written to the backend's cache.
        reasoning: completion tokens that were reasoning.
    """

    prompt: int | None = None
    completion: int | None = None
    cached: int = 0
    cache_written: int = 0
    reasoning: int = 0


NO_COUNTS = TokenCounts()


_USAGE = msgspec.json.Decoder(Usage)
_RAW_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])


def token_counts(raws: list[msgspec.Raw]) -> TokenCounts:
    """Reads the usage objects of an answer; in a stream, later ones override earlier ones.

    Raises:
        msgspec.DecodeError: if one is not a usage object, or its counts are implausible.
    """
    if not raws:
        return NO_COUNTS
    if len(raws) == 1:
        return _counts(_USAGE.decode(raws[0]))
    merged: dict[str, msgspec.Raw] = {}
    for raw in raws:
        merged |= {key: value for key, value in _RAW_FIELDS.decode(raw).items() if bytes(value) != b"null"}
    return _counts(_USAGE.decode(msgspec.json.encode(merged)))


def _counts(usage: Usage) -> TokenCounts:
    details = usage.prompt_tokens_details or usage.input_tokens_details
    out_details = usage.completion_tokens_details or usage.output_tokens_details
    prompt = usage.input_tokens if usage.prompt_tokens is None else usage.prompt_tokens
    read, written = usage.cache_read_input_tokens or 0, usage.cache_creation_input_tokens or 0
    if prompt is not None and usage.prompt_tokens is None:
        prompt += read + written
    return TokenCounts(
        prompt=prompt,
        completion=usage.output_tokens if usage.completion_tokens is None else usage.completion_tokens,
        cached=(details.cached_tokens or 0) if details else read,
        cache_written=written,
        reasoning=(out_details.reasoning_tokens or 0) if out_details else 0,
    )


BYTES_PER_TOKEN: Final = 4
"""Rough ratio for JSON with English text; tokenizers differ less than texts do."""

_NOTHING: Final = TokenCounts(prompt=0, completion=0)


def counts_to_reserve(request: CallRequest, *, assumed_completion: int) -> TokenCounts:
    """Returns the tokens that a call reserves: its prompt, estimated from its size, and its maximum completion.

    Args:
        assumed_completion: completion tokens of a call that sets no maximum.
    """
    if not request.api.is_metered:
        return _NOTHING
    completion = assumed_completion if request.max_tokens is None else min(max(0, request.max_tokens), MAX_TOKENS)
    return TokenCounts(prompt=_prompt(request), completion=completion)


def tokens_to_reserve(request: CallRequest, *, assumed_completion: int) -> int:
    """Returns the sum of `counts_to_reserve`."""
    counts = counts_to_reserve(request, assumed_completion=assumed_completion)
    return (counts.prompt or 0) + (counts.completion or 0)


def used(request: CallRequest, counts: TokenCounts | None, collected: Collected | None) -> TokenCounts:
    """Returns a call's usage as the backend reports it; an estimate if an answer started without a report.

    This includes the tokens of a caller that disconnects before the usage arrives.
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
