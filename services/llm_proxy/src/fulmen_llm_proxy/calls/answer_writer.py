"""Where a call's answer is written, over whichever protocol it arrived."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from types import TracebackType
from typing import Protocol, Self

Header = tuple[bytes, bytes]


class DisconnectWatch(Protocol):
    """Raises CallerGone in its block as soon as the caller disconnects."""

    async def __aenter__(self) -> Self:
        """Starts watching."""
        ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stops watching."""
        ...

    def settle(self) -> None:
        """Stops watching early: a disconnect no longer matters."""
        ...


class AnswerWriter(Protocol):
    """Writes one answer: either `whole`, or `begin`, any number of `piece`, and `end`.

    A method returns once the connection has accepted the bytes, so a slow caller slows down its backend.
    """

    def watch(self) -> DisconnectWatch:
        """Returns a watch for the caller's disconnect."""
        ...

    async def whole(self, status: int, body: bytes, content_type: bytes, extra: Sequence[Header] = ()) -> None:
        """Writes a complete answer."""
        ...

    async def begin(self, content_type: bytes, extra: Sequence[Header] = ()) -> None:
        """Starts a stream with status 200."""
        ...

    def piece(self, data: bytes) -> Awaitable[None]:
        """Writes complete events of the stream."""
        ...

    async def end(self) -> None:
        """Ends the stream."""
        ...
