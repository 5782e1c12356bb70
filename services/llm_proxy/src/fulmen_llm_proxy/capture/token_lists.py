"""Packs the token ids, log-probabilities and texts of an answer, which arrive as JSON: compiled if possible, otherwise in Python.

The compiled functions refuse what is unusual, and Python decides about it: both ways have the same results and errors.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Annotated, Any, Final

import msgspec
import structlog

from fulmen_llm_proxy.native.library import LibraryUnavailable
from fulmen_llm_proxy.native.tokens import TokenPacker, load

_log = structlog.get_logger(__name__)


class _Logprob(msgspec.Struct, gc=False):
    """Of texts, which are for people only, any value is read: a strange one must not spoil the call."""

    logprob: float
    token: Any = None
    bytes: msgspec.Raw = msgspec.Raw()


class _Logprobs(msgspec.Struct):
    """`content` in chat completions, `token_logprobs` and `tokens` in completions."""

    content: list[_Logprob] | None = None
    token_logprobs: list[float] | None = None
    tokens: Any = None


_PARTIAL: Final = "\N{REPLACEMENT CHARACTER}"
"""What backends write for a token that is a part of a character; its `bytes` have it."""

_BYTES = msgspec.json.Decoder(list[Annotated[int, msgspec.Meta(ge=0, le=255)]])
_PIECES_OF_IDS = msgspec.json.Decoder(list[list[int] | None])
_PIECES_OF_LOGPROBS = msgspec.json.Decoder(list[_Logprobs])


class _Compiled:
    packer: TokenPacker | None = None


def use_compiled() -> None:
    """Loads the compiled functions, once per process; without them Python does the work, which is logged."""
    try:
        _Compiled.packer = load()
    except LibraryUnavailable as error:
        _log.warning("tokens_packed_in_python", reason=str(error))


def pack_ids(pieces: Sequence[msgspec.Raw]) -> tuple[bytes, Sequence[int]]:
    """Returns the ids of all pieces as little-endian int32, and how many each piece has.

    Raises:
        msgspec.DecodeError, struct.error: if a piece is not a list of ids or null.
    """
    joined, packer = _joined(pieces), _Compiled.packer
    packed = None if packer is None else packer.ids(joined, len(pieces))
    return ids_in_python(joined) if packed is None else packed


def pack_logprobs(pieces: Sequence[msgspec.Raw]) -> tuple[bytes, bytes, Sequence[int]]:
    """Packs the log-probabilities of all pieces.

    Returns:
        Little-endian float32 log-probabilities, the texts of tokens one behind the other, and how many bytes each has,
        0 where the backend does not say.

    Raises:
        msgspec.DecodeError, struct.error, OverflowError: if a piece is of another form.
    """
    joined, packer = _joined(pieces), _Compiled.packer
    packed = None if packer is None else packer.logprobs(joined)
    return logprobs_in_python(joined) if packed is None else packed


def ids_in_python(joined: bytes) -> tuple[bytes, Sequence[int]]:
    """Does what `pack_ids` does, with the pieces in one JSON list."""
    pieces = [piece or [] for piece in _PIECES_OF_IDS.decode(joined)]
    token_ids = pieces[0] if len(pieces) == 1 else [token_id for piece in pieces for token_id in piece]
    # Several times faster than array("i", ...), and little-endian on every machine.
    return struct.pack(f"<{len(token_ids)}i", *token_ids), [len(piece) for piece in pieces]


def logprobs_in_python(joined: bytes) -> tuple[bytes, bytes, Sequence[int]]:
    """Does what `pack_logprobs` does, with the pieces in one JSON list."""
    logprobs: list[float] = []
    texts: list[bytes] = []
    for found in _PIECES_OF_LOGPROBS.decode(joined):
        logprobs += found.token_logprobs or [entry.logprob for entry in found.content or ()]
        texts += _texts(found)
    return struct.pack(f"<{len(logprobs)}f", *logprobs), b"".join(texts), list(map(len, texts))


def _texts(found: _Logprobs) -> list[bytes]:
    """Returns the bytes of each token, empty where the backend does not report them."""
    if found.token_logprobs:
        return [_text(each, None) for each in found.tokens] if isinstance(found.tokens, list) else []
    entries = found.content or ()
    try:
        tokens = [entry.token for entry in entries]
        if _PARTIAL not in "".join(tokens):
            return [token.encode() for token in tokens]
    except (TypeError, UnicodeEncodeError):
        pass  # not all are texts
    return [_text(entry.token, entry.bytes) for entry in entries]


def _text(token: object, raw: msgspec.Raw | None) -> bytes:
    if not isinstance(token, str):
        return b""
    if raw and _PARTIAL in token:
        try:
            return bytes(_BYTES.decode(raw))
        except msgspec.DecodeError:
            pass
    return token.encode(errors="replace")


def _joined(raws: Sequence[msgspec.Raw]) -> bytes:
    """Joins slices to one JSON list, which decodes in a third of the time of the pieces."""
    return b"[%b]" % b",".join(raws)
