"""Where a call's answer goes, whatever the wire."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from types import TracebackType
from typing import Protocol, Self

Header = tuple[bytes, bytes]


class Watch(Protocol):
    """Raises CallerGone in its block as soon as the caller has left."""

    async def __aenter__(self) -> Self:
        """Begins to watch."""
        ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends the watch."""
        ...

    def settle(self) -> None:
        """Ends the watch early: from here on the caller's leaving is no news."""
        ...


class Sink(Protocol):
    """Takes one answer: either `whole`, or `begin`, any number of `piece`, and `end`.

    A method returns when the wire has taken the bytes: a slow caller slows its backend down.
    """

    def watch(self) -> Watch:
        """Returns a watch for the caller's leaving."""
        ...

    async def whole(self, status: int, body: bytes, content_type: bytes, extra: Sequence[Header] = ()) -> None:
        """Sends a whole answer."""
        ...

    async def begin(self, content_type: bytes, extra: Sequence[Header] = ()) -> None:
        """Begins a stream of status 200."""
        ...

    def piece(self, data: bytes) -> Awaitable[None]:
        """Sends whole events of the stream."""
        ...

    async def end(self) -> None:
        """Ends the stream."""
        ...
