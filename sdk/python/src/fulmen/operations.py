"""`fulmen.operation`: a function or block of an agent as a span.

Invariant: a wrapped function behaves as before: same results, same exceptions, and the same kind of function (plain,
async, generator, async generator). Its span is current only while its own code runs.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any, TypeVar, overload

from opentelemetry import trace

from fulmen.agent import acting_agent, acting_as, current_step
from fulmen.spans import attributes as names
from fulmen.spans.recorded import cut, json_text, plain_attributes
from fulmen.spans.tracing import parent_context, tracer

__all__ = ["Operation", "OpenOperation", "operation"]

F = TypeVar("F", bound=Callable[..., Any])


@overload
def operation(wrapped: F, /) -> F: ...


@overload
def operation(
    name: str = "",
    /,
    *,
    agent: str = "",
    attributes: Mapping[str, object] | None = None,
    record_arguments: bool = True,
    record_result: bool = True,
) -> Operation: ...


def operation(
    wrapped: Callable[..., Any] | str = "",
    /,
    *,
    agent: str = "",
    attributes: Mapping[str, object] | None = None,
    record_arguments: bool = True,
    record_result: bool = True,
) -> Any:
    """Records a function (`@operation`, `@operation("plan")`) or block (`with operation("plan"):`) as a span.

    Args:
        wrapped: The function, or the span's name; the default name is the function's.
        agent: The sub-agent of this code and of the model calls below it.
        attributes: Further attributes of the span.
        record_arguments: Whether to record a function's arguments, truncated to 8192 characters of JSON.
        record_result: Whether to record its result, likewise; for a generator, its return value.
    """
    named = wrapped if isinstance(wrapped, str) else ""
    made = Operation(
        named, agent=agent, attributes=attributes, record_arguments=record_arguments, record_result=record_result
    )
    return made if isinstance(wrapped, str) else made(wrapped)


class OpenOperation:
    """A running operation."""

    def __init__(self, span: trace.Span, agent: str) -> None:
        self._span = span
        self._agent = agent

    @property
    def span_id(self) -> bytes:
        """Id of the span, for `emit_reward(..., span=...)`; eight bytes, all zero without tracing."""
        return self._span.get_span_context().span_id.to_bytes(8, "big")

    def set_attribute(self, key: str, value: object) -> None:
        """Sets an attribute of the span."""
        self._set(*plain_attributes({key: value}))

    def set_result(self, value: object) -> None:
        """Records the result, truncated to 8192 characters of JSON."""
        text, was_cut = json_text(value)
        self._set({names.OPERATION_RESULT: text}, was_cut)

    def set_arguments(self, arguments: Mapping[str, object]) -> None:
        """Records the input, truncated to 8192 characters of JSON."""
        text, was_cut = json_text(dict(arguments))
        self._set({names.OPERATION_ARGUMENTS: text}, was_cut)

    def _set(self, attributes: Mapping[str, Any], was_cut: bool) -> None:
        self._span.set_attributes(attributes)
        if was_cut:
            self._span.set_attribute(names.TRUNCATED, True)

    def _failed(self, error: BaseException) -> None:
        self._span.record_exception(error)
        message, _ = cut(f"{type(error).__name__}: {error}")
        self._span.set_status(trace.StatusCode.ERROR, message)

    def _end(self) -> None:
        self._span.end()

    @contextmanager
    def _running(self) -> Iterator[None]:
        shown = trace.use_span(self._span, end_on_exit=False, record_exception=False, set_status_on_exception=False)
        with shown, acting_as(self._agent or acting_agent()):
            yield


class Operation:
    """The result of `operation`: a decorator, or a context manager for one block."""

    def __init__(
        self,
        name: str,
        *,
        agent: str,
        attributes: Mapping[str, object] | None,
        record_arguments: bool,
        record_result: bool,
    ) -> None:
        self._name = name
        self._agent = agent
        self._attributes = dict(attributes or {})
        self._record_arguments = record_arguments
        self._record_result = record_result
        self._block: tuple[OpenOperation, Any] | None = None

    def __call__(self, function: F) -> F:
        """Wraps a function."""
        if not callable(function):
            raise TypeError(f"An operation is a function or a block, not {type(function).__name__}.")
        if inspect.isasyncgenfunction(function):
            wrapper = self._async_generator(function)
        elif inspect.iscoroutinefunction(function):
            wrapper = self._coroutine(function)
        elif inspect.isgeneratorfunction(function):
            wrapper = self._generator(function)
        else:
            wrapper = self._plain(function)
        return functools.wraps(function)(wrapper)  # type: ignore[return-value]  # It takes and returns the same.

    def __enter__(self) -> OpenOperation:
        """Begins the block."""
        if self._block is not None:
            raise RuntimeError("This operation is already open: make one for each block.")
        opened = self._open(self._name or "operation")
        running = opened._running()
        running.__enter__()
        self._block = opened, running
        return opened

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Ends the block."""
        assert self._block is not None  # `with` enters before it exits.
        opened, running = self._block
        self._block = None
        if error is not None and not isinstance(error, GeneratorExit):
            opened._failed(error)
        running.__exit__(None, None, None)
        opened._end()

    async def __aenter__(self) -> OpenOperation:
        """Begins the block."""
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        """Ends the block."""
        self.__exit__(kind, error, at)

    def _open(self, name: str, function: Callable[..., Any] | None = None) -> OpenOperation:
        known: dict[str, Any] = {names.OPERATION_NAME: name}
        if function is not None:
            known[names.FUNCTION] = f"{function.__module__}.{function.__qualname__}"
        if self._agent:
            known |= {names.AGENT_NAME: self._agent, names.GEN_AI_OPERATION: names.INVOKE_AGENT}
        step = current_step()
        if step is not None:
            known[names.STEP] = step
        more, was_cut = plain_attributes(self._attributes)
        opened = OpenOperation(tracer().start_span(name, context=parent_context()), self._agent)
        opened._set(known | more, was_cut)
        return opened

    @contextmanager
    def _call(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Iterator[OpenOperation]:
        opened = self._open(self._name or getattr(function, "__qualname__", "operation"), function)
        if self._record_arguments:
            opened.set_arguments(_named_arguments(function, args, kwargs))
        try:
            yield opened
        except GeneratorExit:
            raise
        except BaseException as error:
            opened._failed(error)
            raise
        finally:
            opened._end()

    def _result(self, opened: OpenOperation, value: object) -> None:
        if self._record_result:
            opened.set_result(value)

    def _plain(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            with self._call(function, args, kwargs) as opened, opened._running():
                result = function(*args, **kwargs)
                self._result(opened, result)
                return result

        return wrapper

    def _coroutine(self, function: Callable[..., Any]) -> Callable[..., Any]:
        async def wrapper(*args: Any, **kwargs: Any) -> Any:
            with self._call(function, args, kwargs) as opened, opened._running():
                result = await function(*args, **kwargs)
                self._result(opened, result)
                return result

        return wrapper

    def _generator(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
            with self._call(function, args, kwargs) as opened:
                generator = function(*args, **kwargs)
                step = functools.partial(next, generator)
                items = 0
                try:
                    while True:
                        try:
                            with opened._running():
                                item = step()
                        except StopIteration as end:
                            self._result(opened, end.value)
                            return end.value
                        items += 1
                        try:
                            step = functools.partial(generator.send, (yield item))
                        except GeneratorExit:
                            with opened._running():
                                generator.close()
                            raise
                        except BaseException as error:  # noqa: BLE001  # thrown in by the consumer, for the generator
                            step = functools.partial(generator.throw, error)
                finally:
                    opened.set_attribute(names.OPERATION_ITEMS, items)

        return wrapper

    def _async_generator(self, function: Callable[..., Any]) -> Callable[..., Any]:
        async def wrapper(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
            with self._call(function, args, kwargs) as opened:
                generator = function(*args, **kwargs)
                step = functools.partial(generator.asend, None)
                items = 0
                try:
                    while True:
                        try:
                            with opened._running():
                                item = await step()
                        except StopAsyncIteration:
                            return
                        items += 1
                        try:
                            step = functools.partial(generator.asend, (yield item))
                        except GeneratorExit:
                            with opened._running():
                                await generator.aclose()
                            raise
                        except BaseException as error:  # noqa: BLE001  # thrown in by the consumer, for the generator
                            step = functools.partial(generator.athrow, error)
                finally:
                    opened.set_attribute(names.OPERATION_ITEMS, items)

        return wrapper


def _named_arguments(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a call by name, without a method's own object."""
    try:
        bound = inspect.signature(function).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):
        return {**{str(index): value for index, value in enumerate(args)}, **kwargs}
    return {name: value for index, (name, value) in enumerate(bound.items()) if index or name not in ("self", "cls")}
