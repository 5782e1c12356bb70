"""Agent Lightning's emitters, on top of Fulmen's.

A reward reaches the store with the attempt's completion, as every reward of Fulmen; its primary dimension is `reward`. Outside an
attempt emitters raise RuntimeError, as theirs do without a tracer. The records that they return have their names of attributes.
"""

from __future__ import annotations

import functools
import inspect
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, TypeVar

import fulmen.agent
import fulmen.emit
from fulmen.compat.agentlightning.attributes import (
    AGL_ANNOTATION,
    AGL_OPERATION,
    LINK,
    MESSAGE_BODY,
    OBJECT_JSON,
    OBJECT_LITERAL,
    OPERATION_INPUT,
    OPERATION_NAME,
    OPERATION_OUTPUT,
    REWARD,
    TAG,
    NamedReward,
    flat,
    reward_in,
    rewards_in,
)
from fulmen.compat.agentlightning.records import SpanCoreFields, TraceStatus

__all__ = [
    "emit_annotation",
    "emit_exception",
    "emit_message",
    "emit_object",
    "emit_reward",
    "find_final_reward",
    "find_reward_spans",
    "get_message_value",
    "get_object_value",
    "get_reward_value",
    "get_rewards_from_span",
    "is_reward_span",
    "make_link_attributes",
    "make_tag_attributes",
    "operation",
    "reward",
]

F = TypeVar("F", bound=Callable[..., Any])

_NOT_IN_DIMENSION = re.compile(r"[^a-z0-9_.-]+")


def emit_reward(
    reward: float | Mapping[str, Any],
    *,
    primary_key: str | None = None,
    attributes: Mapping[str, Any] | None = None,
    propagate: bool = True,
) -> SpanCoreFields:
    """Emits a reward; the last one of an attempt counts.

    Args:
        reward: A number, or numbers by dimension.
        primary_key: The dimension of a mapping that is trained on. It becomes Fulmen's `reward`; the others keep their names, in
            lower case and with `-` for other characters than [a-z0-9_.-].
        attributes: Further attributes, recorded as an annotation.
        propagate: Whether to emit, or only to return the record.

    Raises:
        TypeError: If a single reward is not a number.
        ValueError: If a reward of a mapping is not, or `primary_key` is not in it.
        RewardInvalid: If a reward is not finite.
        RuntimeError: Outside an attempt.
    """
    values = _dimensions(reward, primary_key)
    if propagate:
        _require_attempt("reward")
        first, *others = values
        named = {_dimension(name): value for name, value in others}
        fulmen.emit.emit_reward({**named, fulmen.agent.FINAL_DIMENSION: first[1]})
        if attributes:
            fulmen.emit.emit_annotation(flat(attributes))
    numbered = [{"name": name, "value": value} for name, value in values]
    return _record(AGL_ANNOTATION, flat({REWARD: numbered, **(attributes or {})}))


def _dimensions(reward: object, primary_key: str | None) -> list[tuple[str, float]]:
    if not isinstance(reward, Mapping):
        if not isinstance(reward, int | float):
            raise TypeError(f"Reward must be a number, got: {type(reward)}")
        return [("primary", float(reward))]
    for name, value in reward.items():
        if not isinstance(value, int | float):
            raise ValueError(f"Reward value must be a number, got: {type(value)} for key {name}")
    if primary_key is None or primary_key not in reward:
        raise ValueError(f"primary_key must be one of the reward's dimensions {list(reward)}, not {primary_key!r}.")
    names = [primary_key, *(name for name in reward if name != primary_key)]
    return [(name, float(reward[name])) for name in names]


def _dimension(name: str) -> str:
    word = _NOT_IN_DIMENSION.sub("-", name.lower())[:64]
    return f"{word[:58]}-other" if word == fulmen.agent.FINAL_DIMENSION else word


def emit_annotation(annotation: Mapping[str, Any], propagate: bool = True) -> SpanCoreFields:
    """Adds an annotation to the attempt; nested values get dotted names."""
    attributes = flat(annotation)
    if propagate:
        _require_attempt("annotation")
        fulmen.emit.emit_annotation(attributes)
    return _record(AGL_ANNOTATION, attributes)


def emit_message(message: str, attributes: Mapping[str, Any] | None = None, propagate: bool = True) -> None:
    """Records a message."""
    if not isinstance(message, str):
        raise TypeError(f"Message must be a string, got: {type(message)}.")
    if propagate:
        _require_attempt("message")
        fulmen.emit.emit_message(message, attributes=flat(attributes or {}))


def emit_object(
    object: Any,  # noqa: A002  # their name
    attributes: Mapping[str, Any] | None = None,
    propagate: bool = True,
) -> SpanCoreFields:
    """Records a value that has a form in JSON.

    Raises:
        RuntimeError: If it has none.
    """
    if isinstance(object, bytes):
        held = {OBJECT_LITERAL: object.hex()}
    else:
        try:
            held = {OBJECT_JSON: json.dumps(object)}
        except (TypeError, ValueError) as error:
            raise RuntimeError(f"Object must be JSON serializable, got: {type(object)}.") from error
    if propagate:
        _require_attempt("object")
        fulmen.emit.emit_object(object, attributes=flat(attributes or {}))
    return _record("agentlightning.object", {**held, **flat(attributes or {})})


def emit_exception(
    exception: BaseException, attributes: Mapping[str, Any] | None = None, propagate: bool = True
) -> None:
    """Records an exception that the agent caught."""
    if not isinstance(exception, BaseException):
        raise TypeError(f"Expected a BaseException instance, got: {type(exception)}.")
    if propagate:
        _require_attempt("exception")
        fulmen.emit.emit_exception(exception, attributes=flat(attributes or {}))


def reward(fn: F) -> F:
    """Emits what the function returns as a reward, as `emit_reward` does; for programs of their version 0.2."""
    if inspect.iscoroutinefunction(fn):

        @functools.wraps(fn)
        async def later(*args: Any, **kwargs: Any) -> Any:
            value = await fn(*args, **kwargs)
            emit_reward(value)
            return value

        return later  # type: ignore[return-value]  # It takes and returns the same.

    @functools.wraps(fn)
    def now(*args: Any, **kwargs: Any) -> Any:
        value = fn(*args, **kwargs)
        emit_reward(value)
        return value

    return now  # type: ignore[return-value]  # It takes and returns the same.


class OperationContext:
    """An open operation, in `with operation(...) as op:`."""

    def __init__(self, name: str, attributes: Mapping[str, Any]) -> None:
        self._name = name
        self._attributes = flat(attributes)
        self._recorded: dict[str, Any] = {OPERATION_NAME: name, **self._attributes}
        self._block: AbstractContextManager[Any] | None = None
        self._open: Any = None
        self._started = 0.0
        self._span: SpanCoreFields | None = None

    def __enter__(self) -> OperationContext:
        """Begins the block."""
        from fulmen.operations import operation as fulmen_operation

        self._started = time.time()
        self._block = fulmen_operation(self._name, attributes=self._attributes)
        self._open = self._block.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Ends the block."""
        assert self._block is not None  # `with` enters before it exits.
        self._block.__exit__(kind, error, at)
        status = TraceStatus(status_code="OK" if error is None else "ERROR", description=str(error) if error else None)
        self._span = SpanCoreFields(
            name=AGL_OPERATION,
            status=status,
            attributes=self._recorded,
            start_time=self._started,
            end_time=time.time(),
        )

    def __call__(self, fn: F) -> F:
        """Records a function's calls."""
        from fulmen.operations import operation as fulmen_operation

        return fulmen_operation(self._name or fn.__name__, attributes=self._attributes)(fn)

    def set_input(self, *args: Any, **kwargs: Any) -> None:
        """Records the input."""
        named = {**({"args": list(args)} if args else {}), **kwargs}
        self._recorded |= flat({OPERATION_INPUT: named})
        self._open.set_arguments(named)

    def set_output(self, output: Any) -> None:
        """Records the output."""
        self._recorded |= flat({OPERATION_OUTPUT: output})
        self._open.set_result(output)

    def span(self) -> SpanCoreFields:
        """Returns the record of the block, once it has ended."""
        if self._span is None:
            raise RuntimeError("Span is not ready yet.")
        return self._span


def operation(
    fn: Callable[..., Any] | None = None,
    *,
    propagate: bool = True,
    name: str | None = None,
    **additional_attributes: Any,
) -> Any:
    """Records a function (`@operation`) or a block (`with operation(user=1) as op:`) as a span.

    Args:
        fn: The function.
        propagate: Taken for their sake; operations are always recorded in an attempt, and never outside one.
        name: The span's name; by default the function's.
        additional_attributes: Attributes of the span.
    """
    del propagate
    made = OperationContext(name or "", additional_attributes)
    if fn is None:
        made._name = made._name or "operation"
        return made if name else _NamedLater(additional_attributes)
    if not callable(fn):
        raise ValueError("Custom span names are intentionally not supported when used as a context manager.")
    return made(fn)


class _NamedLater(OperationContext):
    """An operation without a name: it gets the function's name, or `operation` for a block."""

    def __init__(self, attributes: Mapping[str, Any]) -> None:
        super().__init__("operation", attributes)

    def __call__(self, fn: F) -> F:
        """Records a function's calls under its own name."""
        return OperationContext("", self._attributes)(fn)


def get_reward_value(span: Any) -> float | None:
    """Returns the primary reward that a span carries, or None."""
    return reward_in(getattr(span, "name", ""), getattr(span, "attributes", None) or {})


def get_rewards_from_span(span: Any) -> list[NamedReward]:
    """Returns the rewards that a span carries, the primary one first."""
    return rewards_in(getattr(span, "attributes", None) or {})


def is_reward_span(span: Any) -> bool:
    """Returns whether a span carries a reward."""
    return get_reward_value(span) is not None


def find_reward_spans(spans: Sequence[Any]) -> list[Any]:
    """Returns the spans that carry rewards."""
    return [span for span in spans if is_reward_span(span)]


def find_final_reward(spans: Sequence[Any]) -> float | None:
    """Returns the last reward of spans, or None."""
    found = [value for span in spans if (value := get_reward_value(span)) is not None]
    return found[-1] if found else None


def get_message_value(span: Any) -> str | None:
    """Returns the text of a span of a message, or None."""
    value = (span.attributes or {}).get(MESSAGE_BODY)
    return value if value is None else str(value)


def get_object_value(span: Any) -> Any:
    """Returns the value of a span of an object, or None."""
    attributes = span.attributes or {}
    if OBJECT_JSON in attributes:
        return json.loads(attributes[OBJECT_JSON])
    return attributes.get(OBJECT_LITERAL)


def make_tag_attributes(tags: Sequence[str]) -> dict[str, Any]:
    """Returns tags as attributes of a span."""
    return {f"{TAG}.{index}": tag for index, tag in enumerate(tags)}


def make_link_attributes(links: Mapping[str, str]) -> dict[str, Any]:
    """Returns links, attributes of the linked span with their values, as attributes of a span."""
    found = [{"key_match": key, "value_match": value} for key, value in links.items()]
    return flat({LINK: found})


def _record(name: str, attributes: dict[str, Any]) -> SpanCoreFields:
    now = time.time()
    return SpanCoreFields(
        name=name, status=TraceStatus(status_code="OK"), attributes=attributes, start_time=now, end_time=now
    )


def _require_attempt(what: str) -> None:
    """Raises RuntimeError where theirs does: without a tracer, that is, outside a rollout."""
    import os

    from fulmen.attempt_files import REWARDS_FILE_VARIABLE

    if fulmen.agent.current() is None and REWARDS_FILE_VARIABLE not in os.environ:
        raise RuntimeError(f"No attempt is running here. Cannot emit a span of a {what}.")
