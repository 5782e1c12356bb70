"""Token counts as backends report them."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

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
