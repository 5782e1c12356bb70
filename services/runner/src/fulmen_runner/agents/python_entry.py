"""Agents and graders that are Python callables inside the runner, many at once.

Invariant: whatever a callable raises ends its own attempt and nothing else.
"""

import asyncio
import inspect
from collections.abc import Callable
from dataclasses import dataclass

from fulmen_runner.agents.loader import describe_error
from fulmen_runner.agents.spans import AttemptSpans
from fulmen_runner.agents.threads import run_in_thread
from fulmen_runner.domain.errors import AgentFailed
from fulmen_runner.domain.outcome import Reward
from fulmen_runner.domain.program import Answer, Invocation
from fulmen_runner.domain.rewards import reward_of_number, rewards_of_grade
from fulmen_runner.domain.stragglers import Stragglers

_CONTEXT_NAMES = ("context", "ctx")


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonHost:
    """What all Python agents of a runner share.

    Attributes:
        stragglers: Counts threads that go on after their attempt was stopped.
        spans: Where their OpenTelemetry spans go.
    """

    stragglers: Stragglers
    spans: AttemptSpans


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonCallable:
    """A callable of the user's.

    Attributes:
        blocking: True if it is a plain function, which runs in a thread.
        wants_context: True if an agent takes a second argument.
    """

    function: Callable[..., object]
    blocking: bool
    wants_context: bool
    host: PythonHost

    async def call(self, *arguments: object) -> object:
        """Calls it and returns what it returns.

        Raises:
            AgentFailed: With the traceback, if it raises.
        """
        try:
            if not self.blocking:
                return await self.function(*arguments)  # type: ignore[misc]  # Checked by `python_callable`.
            result = await self._call_in_thread(*arguments)
            return await result if inspect.isawaitable(result) else result
        except (Exception, SystemExit) as error:  # noqa: BLE001  # The user's code may raise anything.
            raise AgentFailed(describe_error(error)) from None

    async def _call_in_thread(self, *arguments: object) -> object:
        thread = asyncio.ensure_future(run_in_thread(self.function, *arguments))
        try:
            return await asyncio.shield(thread)
        except asyncio.CancelledError:
            self.host.stragglers.add(thread)
            raise


def python_callable(function: Callable[..., object], host: PythonHost) -> PythonCallable:
    """Finds out how a callable is to be called.

    The context is passed if the second positional parameter is required, or is called `context` or `ctx`.
    """
    call = vars(type(function)).get("__call__")
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)
    return PythonCallable(function=function, blocking=not is_async, wants_context=_wants_context(function), host=host)


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonAgent:
    """An agent that is called as `name(task)` or `name(task, context)`."""

    entry: PythonCallable
    graded: bool

    async def run(self, invocation: Invocation) -> Answer:
        """Calls the agent."""
        more = (invocation.context,) if self.entry.wants_context else ()
        spans = self.entry.host.spans
        spans.enter(invocation.context.environment["TRACEPARENT"])
        try:
            value = await self.entry.call(invocation.task, *more)
        finally:
            await spans.flush(invocation.work.attempt)
        return Answer(value=value, rewards=() if self.graded else reward_of_number(value))


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonGrader:
    """A grader that is called as `name(task, outcome)`."""

    entry: PythonCallable

    async def grade(self, invocation: Invocation, outcome: object) -> tuple[Reward, ...]:
        """Calls the grader."""
        try:
            return rewards_of_grade(await self.entry.call(invocation.task, outcome))
        except AgentFailed as error:
            raise AgentFailed(f"The grader failed. {error}") from None


def _wants_context(function: Callable[..., object]) -> bool:
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return False
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len(positional) > 1 and (
        positional[1].default is positional[1].empty or positional[1].name in _CONTEXT_NAMES
    )
