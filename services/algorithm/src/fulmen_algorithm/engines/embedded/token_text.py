"""The bytes that a token stands for: names of a vocabulary are written in the alphabet of its kind, and may be parts of characters."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from transformers import PreTrainedTokenizerBase

__all__ = ["token_bytes"]

_BYTE: Final = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE: Final = "\N{LOWER ONE EIGHTH BLOCK}"


def token_bytes(tokenizer: PreTrainedTokenizerBase, token_ids: list[int]) -> list[bytes]:
    """Returns the bytes of each token, of special tokens their names."""
    names: list[str | None] = tokenizer.convert_ids_to_tokens(token_ids)  # type: ignore[assignment]  # None beyond the vocabulary
    of_name = _of_byte_level if _is_byte_level(tokenizer) else _of_pieces
    return [of_name(name or "") for name in names]


def _is_byte_level(tokenizer: PreTrainedTokenizerBase) -> bool:
    decoder: Any = tokenizer.backend_tokenizer.decoder
    return decoder is not None and b'"ByteLevel"' in decoder.__getstate__()


def _of_byte_level(name: str) -> bytes:
    try:
        return bytes(_BYTE_OF[sign] for sign in name)
    except KeyError:
        return name.encode()  # a token that was added with characters of its own


def _of_pieces(name: str) -> bytes:
    if found := _BYTE.fullmatch(name):
        return bytes.fromhex(found[1])
    return name.replace(_SPACE, " ").encode()


def _alphabet() -> Mapping[str, int]:
    """Returns the byte of each character of a byte-level vocabulary: printable ones stand for themselves."""
    shown = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + place): byte for place, byte in enumerate(hidden)}


_BYTE_OF: Final = _alphabet()
