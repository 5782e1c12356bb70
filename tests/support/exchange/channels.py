"""A channel whose streams a test reads and writes in its own way."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fulmen.rpc.channel import FulmenChannel

Read = Callable[[], Awaitable[Any]]
Write = Callable[[Any], Awaitable[None]]


class Tapped(FulmenChannel):
    """Replaces the `read` and `write` of every stream by what functions make of them."""

    def __init__(
        self,
        inner: FulmenChannel,
        *,
        write: Callable[[Write], Write] = lambda write: write,
        read: Callable[[Read], Read] = lambda read: read,
    ) -> None:
        self.is_closed = False
        self.unary_unary: Any = inner.unary_unary
        self._inner, self._write, self._read = inner, write, read

    async def close(self, grace: float | None = None) -> None:
        self.is_closed = True
        await self._inner.close(grace)

    def stream_stream(self, method: str, *args: Any, **kwargs: Any) -> Any:
        make = self._inner.stream_stream(method, *args, **kwargs)

        def tapped() -> Any:
            stream: Any = make()
            stream.write, stream.read = self._write(stream.write), self._read(stream.read)
            return stream

        return tapped
