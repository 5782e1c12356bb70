"""Fields of a request that a route sets for one mode."""

from __future__ import annotations

from fulmen.errors import ArgumentInvalid
from fulmen_llm_proxy.apis.api import UNREADABLE, decode_fields, wrong
from fulmen_llm_proxy.apis.collected import Fields

PROTECTED_FIELDS = frozenset(
    {"model", "messages", "input", "prompt", "stream", "stream_options", "return_token_ids", "logprobs"}
)
"""Fields that a route may not override: they are the caller's, or the capture's."""


def parse_overrides(text: str) -> Fields:
    """Reads the JSON object of a route's sampling overrides.

    Raises:
        ArgumentInvalid: if it is not a JSON object, or names a field that a route may not set.
    """
    if not text:
        return {}
    try:
        fields = decode_fields(text.encode())
    except UNREADABLE as error:
        raise ArgumentInvalid(f"Sampling overrides must be a JSON object: {wrong(error)}.") from None
    refused = sorted(PROTECTED_FIELDS & fields.keys())
    if refused:
        raise ArgumentInvalid(f"A route may not override: {', '.join(refused)}.")
    return fields
