"""Runs agents' callables in the main thread, where a debugger has the terminal; everything else runs in other threads.

Invariant: callables run one at a time, each in the context (attempt, trace) of its caller.
"""

import asyncio
import inspect
import queue
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from concurrent.futures import Future
from contextvars import Context, copy_context
from functools import partial, wraps
from pathlib import Path
from typing import Any

from fulmen_runner.agents.python.loader import load_in_place

_Job = Callable[[asyncio.Runner], None]
_END = object()


class MainThread:
    """Runs calls in the thread that is in `serve`."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()

    def serve(self) -> None:
        """Runs calls until `end`; for the main thread.

        Raises:
            KeyboardInterrupt: On Ctrl-C; also raised in the pending call.
        """
        with asyncio.Runner() as runner:
            while (job := self._jobs.get()) is not None:
                job(runner)

    def end(self) -> None:
        """Makes `serve` return after the calls that are queued."""
        self._jobs.put(None)

    def call(self, function: Callable[..., object], *arguments: object) -> object:
        """Calls a function, sync or async, in the main thread; returns its result or raises its exception.

        Blocks: call it in another thread without an event loop.
        """
        return self._call(copy_context(), function, *arguments)

    def load(self, target: str, bundle_dir: Path | None) -> Callable[..., object]:
        """Loads a callable in the main thread and wraps it to run there."""
        loaded = self.call(load_in_place, target, bundle_dir)
        assert callable(loaded)  # Checked by the loader.
        return self.wrapped(loaded)

    def wrapped(self, function: Callable[..., object]) -> Callable[..., object]:
        """Returns a blocking function that runs `function` in the main thread; a generator for a generator function."""
        kinds = (function, getattr(type(function), "__call__", None))  # noqa: B004  # For callable objects.
        if not any(inspect.isgeneratorfunction(each) or inspect.isasyncgenfunction(each) for each in kinds):

            @wraps(function, updated=())
            def call(*arguments: object) -> object:
                return self.call(function, *arguments)

            return call

        @wraps(function, updated=())
        def steps(*arguments: object) -> Generator[object, None, object]:
            generator: Any = self.call(function, *arguments)
            step, close = (
                (_next_async, generator.aclose) if hasattr(generator, "__anext__") else (_next, generator.close)
            )
            try:
                while (ended := self.call(step, generator))[0] is not _END:  # type: ignore[index]  # See `_next`.
                    yield ended[1]  # type: ignore[index]
                return ended[1]  # type: ignore[index]
            finally:
                self.call(close)

        return steps

    def _call(self, context: Context, function: Callable[..., object], *arguments: object) -> object:
        done: Future[tuple[object, BaseException | None]] = Future()
        self._jobs.put(partial(_work, done, context, partial(function, *arguments)))
        value, error = done.result()
        if error is not None:
            # Not raised by the future, whose frames would appear in the agent's traceback.
            raise error
        return value


def _work(
    done: Future[tuple[object, BaseException | None]],
    context: Context,
    function: Callable[[], object],
    runner: asyncio.Runner,
) -> None:
    try:
        value = context.run(function)
        if inspect.isawaitable(value):
            value = runner.run(_awaited(value), context=context)
    except KeyboardInterrupt as stop:
        done.set_result((None, stop))
        raise
    except BaseException as error:  # noqa: BLE001  # Passed to the caller, including SystemExit.
        done.set_result((None, _of_the_agent(error)))
    else:
        done.set_result((value, None))


def _of_the_agent(error: BaseException) -> BaseException:
    """Removes the frames of this module and of the event loop from a traceback."""
    last, each = None, error.__traceback__
    while each is not None:
        if each.tb_frame.f_code.co_filename == __file__:
            last = each
        each = each.tb_next
    return error if last is None else error.with_traceback(last.tb_next)


async def _awaited(value: Awaitable[object]) -> object:
    return await value


def _next(generator: Generator[object, None, object]) -> tuple[object, object]:
    """Returns the next value, or `_END` with the generator's return value."""
    try:
        return None, next(generator)
    except StopIteration as end:
        return _END, end.value


async def _next_async(generator: AsyncGenerator[object, None]) -> tuple[object, object]:
    try:
        return None, await anext(generator)
    except StopAsyncIteration:
        return _END, None
