"""Decodes the experts that an engine reports of an answer; see `fulmen.routed_experts`."""

from __future__ import annotations

import base64
import binascii

import msgspec

from fulmen.routed_experts import RoutedExperts, RoutedExpertsInvalid, read_npy

_TEXT = msgspec.json.Decoder(str)


def decode_experts(encoded: msgspec.Raw, *, tokens: int) -> RoutedExperts:
    """Decodes the experts of a choice, and leaves out the oldest tokens of a long one.

    Args:
        encoded: base64 of a `.npy` file, as JSON.
        tokens: tokens of its prompt and completion.

    Raises:
        RoutedExpertsInvalid: if they are of another form, or of more tokens.
    """
    try:
        experts = read_npy(base64.b64decode(_TEXT.decode(encoded), validate=True))
    except (msgspec.DecodeError, binascii.Error, UnicodeError) as error:
        raise RoutedExpertsInvalid("The experts of an answer are not a base64-encoded file.") from error
    if experts.token_count > tokens:
        raise RoutedExpertsInvalid(f"There are experts of {experts.token_count} tokens for {tokens}.")
    return experts.newest() if experts.spans else experts
