"""The compiled functions that pack tokens (`tokens.cpp`). Without them, and for what they do not handle, each returns None."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from fulmen_llm_proxy.native.library import LibraryUnavailable, cache_folder, open_library

_MAX_JSON_BYTES = 2 * 1024 * 1024
"""Largest JSON list that is handled; a longer one is not a usual answer."""
_VALUE_BYTES = 4
_INT, _AT = ctypes.c_int64, ctypes.c_void_p


class _Scratch(threading.local):
    """Where a thread's values are written before they are copied."""

    def __init__(self) -> None:
        self.grow(64 * 1024)

    def grow(self, size_bytes: int) -> None:
        """Makes room for so many bytes."""
        # Values, the sizes of their texts, and the texts, which are no longer than their JSON.
        self.buffers = [ctypes.create_string_buffer(size_bytes) for _ in range(3)]
        self.at, self.sizes, self.texts = map(ctypes.addressof, self.buffers)
        self.capacity = size_bytes // _VALUE_BYTES


class TokenPacker:
    """Calls the functions of a library."""

    def __init__(self, library: ctypes.PyDLL) -> None:
        """Declares the functions."""
        self._ids, self._logprobs = library.fulmen_pack_ids, library.fulmen_pack_logprobs
        self._ids.restype = self._logprobs.restype = _INT
        self._ids.argtypes = [ctypes.c_char_p, _INT, _AT, _INT, _AT, _INT]
        self._logprobs.argtypes = [ctypes.c_char_p, _INT, _AT, _AT, _INT, _AT]
        self._scratch = _Scratch()

    def ids(self, joined: bytes, pieces: int) -> tuple[bytes, Sequence[int]] | None:
        """Packs `[[1, 2], null]`: little-endian int32 ids, and how many each piece has; None if it is unusual."""
        scratch = self._room(joined)
        if scratch is None:
            return None
        lengths = (_INT * pieces)()
        count = self._ids(joined, len(joined), scratch.at, scratch.capacity, lengths, pieces)
        return None if count < 0 else (ctypes.string_at(scratch.at, count * _VALUE_BYTES), lengths[:])

    def logprobs(self, joined: bytes) -> tuple[bytes, bytes, Sequence[int]] | None:
        """Packs `[{"content": [{"token": "a", "logprob": -0.5}]}]`.

        Returns:
            Little-endian float32 log-probabilities, the texts of tokens one behind the other, and the bytes of each;
            None if it is unusual.
        """
        scratch = self._room(joined)
        if scratch is None:
            return None
        count = self._logprobs(joined, len(joined), scratch.at, scratch.sizes, scratch.capacity, scratch.texts)
        if count < 0:
            return None
        sizes = (ctypes.c_int32 * count).from_address(scratch.sizes)[:]
        return (
            ctypes.string_at(scratch.at, count * _VALUE_BYTES),
            ctypes.string_at(scratch.texts, sum(sizes)),
            sizes,
        )

    def _room(self, joined: bytes) -> _Scratch | None:
        """Returns room for all values of a JSON list, of which each has two bytes at least; None if it is too long."""
        if len(joined) > _MAX_JSON_BYTES:
            return None
        scratch = self._scratch
        if scratch.capacity < len(joined) // 2 + 1:
            scratch.grow((len(joined) // 2 + 1) * _VALUE_BYTES)
        return scratch


def load(folder: Path | None = None) -> TokenPacker:
    """Loads the functions, which are compiled first if that has not been done.

    Args:
        folder: where libraries are kept; the user's cache if None.

    Raises:
        LibraryUnavailable: if there is no library and none can be compiled.
    """
    if sys.byteorder != "little":
        raise LibraryUnavailable("the processor is not little-endian")
    source = Path(__file__).with_name("tokens.cpp")
    return TokenPacker(open_library(source, cache_folder() if folder is None else folder))
