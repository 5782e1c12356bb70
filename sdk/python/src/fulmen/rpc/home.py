"""One thread with an event loop, where the connections of the Python API live.

gRPC's channels belong to the event loop that made them. Through a `HomeChannel` one connection serves callers with or
without an event loop: scripts, notebooks, whose loop already runs, and asynchronous programs.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import Future
from typing import Any, Final, TypeVar

from fulmen.rpc.channel import FulmenChannel, ResponseStream

__all__ = ["HomeChannel", "await_at_home", "block_on", "iterate"]

T = TypeVar("T")

_END: Final = object()


class _Home:
    """The loop, started at first use. Its thread ends with the process."""

    def __init__(self) -> None:
        self._starting = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def loop(self) -> asyncio.AbstractEventLoop:
        with self._starting:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="fulmen", daemon=True).start()
            return self._loop

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self.loop())

    def is_here(self) -> bool:
        try:
            return asyncio.get_running_loop() is self._loop
        except RuntimeError:
            return False


_home = _Home()


def block_on(work: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine at home and waits for its result; Ctrl-C cancels it.

    Raises:
        RuntimeError: if called at home, where it would wait forever.
    """
    if _home.is_here():
        work.close()
        raise RuntimeError(
            "The blocking client was called inside its own event loop: use the asynchronous client there."
        )
    future = _home.submit(work)
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


def iterate(items: AsyncIterator[T]) -> Iterator[T]:
    """Yields the items of an asynchronous iterator that runs at home; closes it at the end."""

    async def following() -> Any:
        return await anext(items, _END)

    async def close() -> None:
        aclose = getattr(items, "aclose", None)
        if aclose is not None:
            await aclose()

    try:
        while (item := block_on(following())) is not _END:
            yield item
    finally:
        # Not waited for: the collector may end this generator in any thread, at home and when the interpreter ends too.
        _home.submit(close())


async def await_at_home(make: Callable[[], Awaitable[T]]) -> T:
    """Calls a function at home and awaits its result there, from any loop."""
    if _home.is_here():
        return await make()

    async def work() -> T:
        return await make()

    return await asyncio.wrap_future(_home.submit(work()))


class HomeChannel:
    """The channel interface of generated stubs over a channel that is opened at home, by its first call."""

    def __init__(self, open_it: Callable[[], FulmenChannel]) -> None:
        """Opens nothing yet.

        Args:
            open_it: opens the channel; called once, at home.
        """
        self._open_it = open_it
        self._channel: FulmenChannel | None = None

    def unary_unary(self, method: str, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        """Returns the callable of a unary rpc: `await stub.Rpc(request, timeout=seconds)`."""
        call: list[Callable[..., Awaitable[Any]]] = []

        def invoke_here(request: Any, options: Any) -> Awaitable[Any]:
            if not call:
                call.append(self._opened().unary_unary(method, *args, **kwargs))
            return call[0](request, **options)

        async def invoke(request: Any, **options: Any) -> Any:
            return await await_at_home(lambda: invoke_here(request, options))

        return invoke

    def unary_stream(self, method: str, *args: Any, **kwargs: Any) -> Callable[..., _HomeStream]:
        """Returns the callable of a server stream: `async for message in stub.Rpc(request)`."""
        call: list[Callable[..., ResponseStream[Any]]] = []

        def invoke_here(request: Any, options: Any) -> ResponseStream[Any]:
            if not call:
                call.append(self._opened().unary_stream(method, *args, **kwargs))
            return call[0](request, **options)

        return lambda request, **options: _HomeStream(lambda: invoke_here(request, options))

    def stream_unary(self, method: str, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        """Returns the callable of a client stream, whose requests are made at home: `await stub.Rpc(requests)`."""

        async def invoke(requests: Any, **options: Any) -> Any:
            return await await_at_home(
                lambda: self._opened().stream_unary(method, *args, **kwargs)(requests, **options)
            )

        return invoke

    def stream_stream(self, method: str, *_: Any, **__: Any) -> Callable[..., Any]:
        """Not supported: the Python API has no such call."""
        return _refusing(method)

    async def close(self) -> None:
        """Closes the connection; calls in flight end with Unavailable."""

        async def close_here() -> None:
            if self._channel is not None:
                await self._channel.close()

        await await_at_home(close_here)

    def _opened(self) -> FulmenChannel:
        if self._channel is None:
            self._channel = self._open_it()
        return self._channel


class _HomeStream:
    """The responses of a stream that is read at home; opened by the first read."""

    def __init__(self, open_it: Callable[[], ResponseStream[Any]]) -> None:
        self._open_it = open_it
        self._stream: ResponseStream[Any] | None = None
        self._is_cancelled = False

    def __aiter__(self) -> _HomeStream:
        return self

    async def __anext__(self) -> Any:
        # A StopAsyncIteration cannot be the result of a future.
        message = await await_at_home(self._next)
        if message is _END:
            raise StopAsyncIteration
        return message

    async def _next(self) -> Any:
        if self._is_cancelled:
            return _END
        if self._stream is None:
            self._stream = self._open_it()
        return await anext(self._stream, _END)

    def cancel(self) -> None:
        """Ends the call."""
        self._is_cancelled = True
        if self._stream is not None:
            _home.loop().call_soon_threadsafe(self._stream.cancel)


def _refusing(method: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"{method} takes a stream of requests: use fulmen.rpc.services.connect.")

    return refuse
