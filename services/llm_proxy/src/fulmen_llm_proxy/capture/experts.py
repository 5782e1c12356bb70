"""Decodes the experts that an engine reports of an answer; see `fulmen.routed_experts`."""

from __future__ import annotations

import base64
import binascii

import msgspec

from fulmen.model_call import ModelCallInvalid, read_experts
from fulmen.routed_experts import RoutedExperts, RoutedExpertsInvalid, read_npy, write_npy
from fulmen.type.v1 import model_call_pb2

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
        raise RoutedExpertsInvalid("Experts of an answer are not base64 of a file.") from error
    if experts.token_count > tokens:
        raise RoutedExpertsInvalid(f"There are experts of {experts.token_count} tokens for {tokens}.")
    return experts.newest() if experts.spans else experts


def packed_experts(experts: RoutedExperts) -> model_call_pb2.RoutedExperts:
    """Returns the record of one range of tokens for the store."""
    return model_call_pb2.RoutedExperts(
        layers=experts.layers,
        top_k=experts.top_k,
        entry_bytes=experts.entry_bytes,
        first_token=experts.spans[0][0] if experts.spans else 0,
        experts=experts.packed,
    )


def experts_answer(packed: model_call_pb2.RoutedExperts) -> str:
    """Returns a record as an engine reports it; empty if its oldest tokens were left out, or it is damaged."""
    if packed.first_token:
        return ""
    try:
        return base64.b64encode(write_npy(read_experts(packed))).decode()
    except ModelCallInvalid:
        return ""
