"""Keeps the end of a stream of bytes."""


class Tail:
    """The last bytes of what was added; never holds more than twice as much.

    Attributes:
        seen_bytes: How much was added.
    """

    def __init__(self, kept_bytes: int) -> None:
        self.seen_bytes = 0
        self._kept_bytes = kept_bytes
        self._buffer = bytearray()

    def add(self, data: bytes) -> None:
        """Adds to the end."""
        self.seen_bytes += len(data)
        self._buffer += data
        if len(self._buffer) > 2 * self._kept_bytes:
            del self._buffer[: -self._kept_bytes]

    def text(self) -> str:
        """Returns the end; what is no UTF-8 is replaced."""
        return bytes(self._buffer[-self._kept_bytes :]).decode(errors="replace")
