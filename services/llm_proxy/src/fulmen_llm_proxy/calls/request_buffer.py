"""Bounds the memory of request bodies: they may be large, so limiting their number is not enough."""

from __future__ import annotations

from types import TracebackType

from fulmen_llm_proxy.calls.failures import Refused

_TOO_MANY_REQUESTS = 429


class RequestBuffer:
    """Memory for the bodies of all requests in progress."""

    __slots__ = ("free_bytes",)

    def __init__(self, max_bytes: int) -> None:
        self.free_bytes = max_bytes

    def share(self) -> BufferShare:
        """Returns the share of one request; its memory is released at the end of its block."""
        return BufferShare(self)


class BufferShare:
    """The part of the buffer that one request holds."""

    __slots__ = ("_buffer", "_held_bytes")

    def __init__(self, buffer: RequestBuffer) -> None:
        self._buffer = buffer
        self._held_bytes = 0

    def __enter__(self) -> BufferShare:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def release(self) -> None:
        """Gives its memory back."""
        self._buffer.free_bytes += self._held_bytes
        self._held_bytes = 0

    def require(self, size_bytes: int) -> None:
        """Checks that the announced bytes would fit; reserves nothing, since they may never arrive.

        Raises:
            Refused: if they do not fit.
        """
        if size_bytes > self._buffer.free_bytes:
            raise Refused(_TOO_MANY_REQUESTS, "too_many_bytes", "The proxy's buffer for request bodies is full.")

    def reserve(self, size_bytes: int) -> None:
        """Reserves memory for bytes that have arrived.

        Raises:
            Refused: if they do not fit.
        """
        self.require(size_bytes)
        self._buffer.free_bytes -= size_bytes
        self._held_bytes += size_bytes
