"""The end of a byte stream."""


class Tail:
    """Keeps the last `kept_bytes` of a stream, in a buffer of at most twice that size.

    Attributes:
        seen_bytes: Total size of the stream.
    """

    def __init__(self, kept_bytes: int) -> None:
        self.seen_bytes = 0
        self._kept_bytes = kept_bytes
        self._buffer = bytearray()

    def add(self, data: bytes) -> None:
        """Appends data."""
        self.seen_bytes += len(data)
        self._buffer += data
        if len(self._buffer) > 2 * self._kept_bytes:
            del self._buffer[: len(self._buffer) - self._kept_bytes]

    def content(self) -> bytes:
        """Returns the end."""
        return bytes(self._buffer[-self._kept_bytes :]) if self._kept_bytes else b""

    def text(self) -> str:
        """Returns the end as text; invalid UTF-8 is replaced."""
        return self.content().decode(errors="replace")
