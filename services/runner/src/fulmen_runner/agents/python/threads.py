"""Threads that inherit the context of their caller.

Invariant: a thread runs in a copy of the context of the code that started it or submitted to it, so that the current
attempt is known in threads that agents start themselves.
"""

import asyncio
import concurrent.futures.thread
import threading
from collections.abc import Callable, Mapping
from contextvars import copy_context
from typing import Any, TypeVar, cast

import wrapt

T = TypeVar("T")


async def run_in_thread(function: Callable[..., T], *arguments: object) -> T:
    """Calls a blocking function in its own daemon thread. On cancellation, returns immediately; the thread
    continues."""
    return await start_in_thread(function, *arguments)


def start_in_thread(function: Callable[..., T], *arguments: object) -> "asyncio.Future[T]":
    """Calls a blocking function in its own daemon thread; returns a future of its result.

    A daemon thread, so that one that hangs does not keep the runner from exiting. A future rather than a task, because a
    SystemExit in a task would end the event loop. `asyncio.shield` it to observe the end of the thread.
    """
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def settle(value: T | None, error: BaseException | None) -> None:
        if result.done():
            return
        if error is None:
            result.set_result(cast("T", value))
        else:
            result.set_exception(error)

    def work() -> None:
        value, failure = None, None
        try:
            value = function(*arguments)
        except BaseException as error:  # noqa: BLE001  # Passed to the awaiting task, SystemExit included.
            # A future does not accept StopIteration.
            failure = RuntimeError("agent raised StopIteration") if isinstance(error, StopIteration) else error
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, value, failure)

    context = copy_context()
    threading.Thread(target=context.run, args=(work,), name="agent", daemon=True).start()
    return result


def carry_context_into_threads() -> None:
    """Makes threads, and calls submitted to thread pools, run in the context of their caller. Idempotent."""
    if isinstance(threading.Thread.start, wrapt.BoundFunctionWrapper):
        return
    wrapt.wrap_function_wrapper(threading, "Thread.start", _start)
    wrapt.wrap_function_wrapper(concurrent.futures.thread, "ThreadPoolExecutor.submit", _submit)


def _start(
    wrapped: Callable[[], None], thread: threading.Thread, args: tuple[()], kwargs: Mapping[str, object]
) -> None:
    context, run = copy_context(), thread.run
    thread.run = lambda: context.run(run)  # type: ignore[method-assign]  # The way to run a thread in a context.
    wrapped()


def _submit(
    wrapped: Callable[..., Any], _: object, args: tuple[Callable[..., object], ...], kwargs: Mapping[str, object]
) -> Any:
    function, *arguments = args
    return wrapped(copy_context().run, function, *arguments, **kwargs)
