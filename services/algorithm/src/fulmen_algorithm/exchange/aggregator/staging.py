"""Where the chunks of a payload are put together."""

from __future__ import annotations

from dataclasses import dataclass, field

from fulmen_algorithm.exchange.aggregator.terms import CHUNK_BYTES


@dataclass(slots=True)
class Staging:
    """One payload of one rank, as far as it has come. Its size was found to be within bounds before.

    Attributes:
        total_bytes: Of the whole payload.
    """

    total_bytes: int
    _data: bytearray = field(init=False, repr=False)
    _missing: set[int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Makes room for it."""
        self._data = bytearray(self.total_bytes)
        self._missing = set(range(0, self.total_bytes, CHUNK_BYTES))

    def problem(self, offset: int, total_bytes: int, size: int) -> str:
        """Says why a chunk cannot be one of this payload; empty if it can."""
        if total_bytes != self.total_bytes:
            return f"a payload of {self.total_bytes} bytes was announced, and now one of {total_bytes}"
        return self.shape_problem(offset, total_bytes, size)

    @staticmethod
    def shape_problem(offset: int, total_bytes: int, size: int) -> str:
        """Says why no payload of that size has such a chunk; empty if one may."""
        if offset < 0 or offset % CHUNK_BYTES or offset >= total_bytes:
            return f"chunks begin at multiples of {CHUNK_BYTES} within the payload"
        if size != min(CHUNK_BYTES, total_bytes - offset):
            return f"a chunk has {CHUNK_BYTES} bytes, but the last one, which has what is left"
        return ""

    def put(self, offset: int, data: bytes) -> None:
        """Puts a chunk in its place; one that is there already stays as it is."""
        if offset in self._missing:
            self._missing.discard(offset)
            self._data[offset : offset + len(data)] = data

    @property
    def is_complete(self) -> bool:
        """Whether nothing is missing."""
        return not self._missing

    def take(self) -> bytearray:
        """Returns the payload."""
        return self._data
