"""Users' callables: how each is called, in the runner or in a child.

Invariant: an exception in a callable ends its own attempt and nothing else.
"""

import asyncio
import inspect
import threading
from collections.abc import AsyncGenerator, Callable, Generator
from dataclasses import dataclass
from typing import cast

import structlog

from fulmen_runner.agents.python.generators import Walked, walk, walk_async
from fulmen_runner.agents.python.loader import describe_error
from fulmen_runner.agents.python.threads import start_in_thread
from fulmen_runner.attempts.errors import AgentFailed
from fulmen_runner.attempts.program import Invocation
from fulmen_runner.attempts.stragglers import Stragglers

_CONTEXT_NAMES = ("context", "ctx")

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonCallable:
    """A user's callable.

    Attributes:
        function: The callable.
        blocking: Whether it is a plain function or generator, which runs in a thread.
        wants_context: Whether it takes the context as its last argument.
        steps_rewarded: Whether yielded numbers are rewards of its steps.
        stragglers: Counts its threads that outlive their attempt.
    """

    function: Callable[..., object]
    blocking: bool
    wants_context: bool
    steps_rewarded: bool
    stragglers: Stragglers

    async def call(self, invocation: Invocation, *arguments: object) -> Walked:
        """Calls it; `returned` of the result is False if the value is a generator's last yield.

        Raises:
            AgentFailed: If it raises; with the traceback.
        """
        arguments = self.arguments(invocation, arguments)
        try:
            if self.blocking:
                return await self.finished(await self._in_thread(invocation, arguments))
            return await self.finished(self.function(*arguments))
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException as error:  # noqa: BLE001  # The user's code may raise anything, SystemExit included.
            raise AgentFailed(describe_error(error)) from None

    def arguments(self, invocation: Invocation, arguments: tuple[object, ...]) -> tuple[object, ...]:
        """Returns the arguments, with the context appended if it takes one."""
        return (*arguments, invocation.context) if self.wants_context else arguments

    def begun(self, arguments: tuple[object, ...], stop: threading.Event) -> object:
        """Calls a blocking callable in this thread; pass the result to `finished`.

        Raises:
            Stopped: If `stop` was set during a generator.
        """
        result = self.function(*arguments)
        if inspect.isgenerator(result):
            steps = cast("Generator[object, None, object]", result)
            return walk(steps, rewarded=self.steps_rewarded, stop=stop)
        return result

    async def finished(self, result: object) -> Walked:
        """Awaits the result of a call, if it is awaitable or an async generator."""
        if inspect.isasyncgen(result):
            return await walk_async(cast("AsyncGenerator[object, None]", result), rewarded=self.steps_rewarded)
        if inspect.isawaitable(result):
            result = await result
        return result if isinstance(result, Walked) else Walked(value=result, returned=True)

    async def _in_thread(self, invocation: Invocation, arguments: tuple[object, ...]) -> object:
        stop = threading.Event()
        thread = start_in_thread(self.begun, arguments, stop)
        try:
            return await asyncio.shield(thread)
        except asyncio.CancelledError:
            stop.set()
            if not thread.done():
                self.stragglers.add(thread, invocation.assignment.attempt)
                _log.warning(
                    "agent_blocks", attempt=invocation.assignment.attempt, setting="FULMEN_RUNNER_ISOLATION=process"
                )
            raise


def python_callable(
    function: Callable[..., object], stragglers: Stragglers, *, argument_count: int, steps_rewarded: bool
) -> PythonCallable:
    """Inspects how a callable is to be called; the context follows `argument_count` other arguments."""
    # For an instance, its type's __call__ decides; that of a plain function is neither async nor a generator.
    forms = (function, type(function).__call__)
    is_async = any(inspect.iscoroutinefunction(form) or inspect.isasyncgenfunction(form) for form in forms)
    return PythonCallable(
        function=function,
        blocking=not is_async,
        wants_context=_wants_context(function, argument_count),
        steps_rewarded=steps_rewarded,
        stragglers=stragglers,
    )


def _wants_context(function: Callable[..., object], argument_count: int) -> bool:
    """Returns True if the parameter after the arguments is required, or is named `context` or `ctx`."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return False
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(positional) <= argument_count:
        return False
    last = positional[argument_count]
    return last.default is last.empty or last.name in _CONTEXT_NAMES
