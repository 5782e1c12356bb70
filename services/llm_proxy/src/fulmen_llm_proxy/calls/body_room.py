"""How many bytes of requests a process holds at once: each may be large, so their number alone is no bound."""

from __future__ import annotations

from types import TracebackType

from fulmen_llm_proxy.calls.failures import Refused

_TOO_MANY = 429


class BodyRoom:
    """The room for the bodies of all requests that are read or answered now."""

    __slots__ = ("free_bytes",)

    def __init__(self, max_bytes: int) -> None:
        self.free_bytes = max_bytes

    def held(self) -> HeldBody:
        """Returns the share of one request; what it takes is given back at the end of its block."""
        return HeldBody(self)


class HeldBody:
    """What one request holds of the room."""

    __slots__ = ("_held_bytes", "_room")

    def __init__(self, room: BodyRoom) -> None:
        self._room = room
        self._held_bytes = 0

    def __enter__(self) -> HeldBody:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._room.free_bytes += self._held_bytes

    def require(self, size_bytes: int) -> None:
        """Checks that there is room for so many bytes, and takes none of it: they may never come.

        Raises:
            Refused: if there is not.
        """
        if size_bytes > self._room.free_bytes:
            raise Refused(_TOO_MANY, "too_many_bytes", "The proxy holds as many bytes of requests as it may.")

    def take(self, size_bytes: int) -> None:
        """Takes room for bytes that have come.

        Raises:
            Refused: if there is none.
        """
        self.require(size_bytes)
        self._room.free_bytes -= size_bytes
        self._held_bytes += size_bytes
