"""Runs blocking agents in threads that know which attempt they work for.

Invariant: a thread runs in a copy of the context of whoever started it or submitted to it, so that the current attempt
is right also in threads that agents start themselves.
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
    """Calls a blocking function in a daemon thread of its own and returns what it returns.

    Being cancelled, this raises at once, and the thread goes on.
    """
    return await start_in_thread(function, *arguments)


def start_in_thread(function: Callable[..., T], *arguments: object) -> "asyncio.Future[T]":
    """Calls a blocking function in a daemon thread of its own; returns the future of what it returns.

    A daemon thread, because nothing can end one that hangs: the runner must be able to exit without it. A future and
    no task: a task that ends by SystemExit ends the event loop, too. `asyncio.shield` it to learn when the thread ends.
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
        except BaseException as error:  # noqa: BLE001  # Handed to the awaiting task, SystemExit included.
            # A future refuses StopIteration: it would end the coroutine that awaits it.
            failure = RuntimeError("the agent raised StopIteration") if isinstance(error, StopIteration) else error
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, value, failure)

    context = copy_context()
    threading.Thread(target=context.run, args=(work,), name="agent", daemon=True).start()
    return result


def carry_context_into_threads() -> None:
    """Makes every thread that is started, and every call that is submitted to a thread pool, run in the context of
    its origin. Once for a process; a second call does nothing.
    """
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
