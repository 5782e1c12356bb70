"""Emitters for agents: rewards, progress, annotations, messages, objects, exceptions.

Invariants: a reward reaches the store with the attempt's completion or not at all; a reward with the same dimension, step
and span replaces the earlier value. Everything emitted except progress is also recorded as a span below the open one, even
if the agent is stopped early. Only `emit_reward` raises exceptions.

OpenTelemetry's SDK is imported at first use, because this module is part of `import fulmen`.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

from fulmen.agent import FINAL_DIMENSION, RewardKey, current, current_step, require_current
from fulmen.spans import attributes as names

if TYPE_CHECKING:
    from opentelemetry.trace import Span, SpanContext

MAX_REWARDS = 256
"""Maximum number of rewards of an attempt."""

MAX_PROGRESS_CHARS = 200
"""Maximum length of the text of a report of progress."""

SPAN_ID_BYTES = 8

CURRENT_SPAN = "current"
"""Value of `span` for the open span."""

_DIMENSION = re.compile(r"[a-z0-9_.-]{1,64}")


class RewardInvalid(ValueError):
    """The reward is not a finite number, or its dimension, step or span is malformed."""


class HasSpanId(Protocol):
    """An open operation."""

    @property
    def span_id(self) -> bytes:
        """Eight bytes."""


def emit_reward(
    value: float | Mapping[str, float],
    *,
    dimension: str = FINAL_DIMENSION,
    step: int | None = None,
    span: Span | SpanContext | HasSpanId | bytes | str | None = None,
    trace: bool = True,
) -> None:
    """Emits one or more rewards of the current attempt.

    Args:
        value: Finite, unitless; a mapping has one value per dimension.
        dimension: Dimension of a single value, 1 to 64 characters of [a-z0-9_.-].
        step: The scored agent step, from 0; None scores the whole attempt.
        span: The scored span: `CURRENT_SPAN`, a span, its context, an open operation, or its id as eight bytes or 16
            hexadecimal digits.
        trace: Whether the reward is also recorded as a span; False costs almost nothing.

    Raises:
        RewardInvalid: If an argument is out of range, or the attempt has too many rewards. No reward is emitted then.
        NotInAttempt: Outside an attempt.
    """
    span_id = b"" if span is None else _span_id(span)
    if isinstance(value, Mapping):
        if dimension != FINAL_DIMENSION:
            raise RewardInvalid("Give dimensions as the mapping's keys or as `dimension`, not both.")
        values: Mapping[str, object] = value
    else:
        values = {dimension: value}
    rewards = {
        (name, step, span_id): checked_reward(number, dimension=name, step=step, span_id=span_id)
        for name, number in values.items()
    }
    _give(rewards)
    if not trace:
        return
    for (name, _, _), number in rewards.items():
        attributes: dict[str, Any] = {names.REWARD_DIMENSION: name, names.REWARD_VALUE: number}
        if step is not None:
            attributes[names.STEP] = step
        if span_id:
            attributes[names.REWARD_SPAN_ID] = span_id.hex()
        _span(names.REWARD_SPAN, attributes, link=span_id)


def emit_progress(fraction: float | None = None, text: str = "") -> None:
    """Reports the progress of the attempt, for people who watch it: `fulmen rollout show` and `fulmen rollout watch`.

    It is shown within a few seconds, while the attempt runs; the last report counts. It costs almost nothing. Outside
    an attempt, and in containers and Jobs, it is not shown.

    Args:
        fraction: Share that is done, 0 to 1; None if unknown.
        text: What the agent is doing; one line, truncated to 200 characters.
    """
    known = as_number(fraction)
    fraction = min(1.0, max(0.0, known)) if known is not None and math.isfinite(known) else None
    text = str(text)[:MAX_PROGRESS_CHARS]
    context = current()
    if context is not None:
        context.progress.fraction, context.progress.text = fraction, text
    from fulmen.attempt_files import PROGRESS_FILE_VARIABLE, write_progress

    path = (os.environ if context is None else context.environment).get(PROGRESS_FILE_VARIABLE)
    if path:
        with suppress(OSError):
            write_progress(path, fraction=fraction, text=text)


def emit_annotation(attributes: Mapping[str, object]) -> None:
    """Adds an annotation to the attempt.

    Args:
        attributes: At most 64. Numbers and booleans are unchanged, texts are truncated to 8192 characters, and other
            values become JSON of at most that length.
    """
    from fulmen.spans.recorded import plain_attributes

    plain, was_cut = plain_attributes(attributes)
    _span(names.ANNOTATION_SPAN, plain, was_cut=was_cut)


def emit_message(content: str, *, role: str = "assistant", attributes: Mapping[str, object] | None = None) -> None:
    """Records a message to, from or between agents.

    Args:
        content: Text, truncated to 8192 characters.
        role: Author: `system`, `user`, `assistant`, `tool`, or another word.
        attributes: Further attributes, as for `emit_annotation`.
    """
    from fulmen.spans.recorded import cut, plain_attributes

    text, was_cut = cut(content)
    more, more_cut = plain_attributes(attributes or {})
    said = {names.MESSAGE_ROLE: cut(role)[0], names.MESSAGE_CONTENT: text}
    _span(names.MESSAGE_SPAN, more | said, was_cut=was_cut or more_cut)


def emit_object(value: object, *, name: str = "", attributes: Mapping[str, object] | None = None) -> None:
    """Records a value.

    Args:
        value: Any value, recorded as at most 8192 characters of JSON; values that JSON cannot represent are recorded
            as their type.
        name: Name of the value.
        attributes: Further attributes, as for `emit_annotation`.
    """
    from fulmen.spans.recorded import cut, json_text, kind_of, plain_attributes

    text, was_cut = json_text(value)
    more, more_cut = plain_attributes(attributes or {})
    noted = {names.OBJECT_NAME: cut(name)[0], names.OBJECT_TYPE: kind_of(value), names.OBJECT_JSON: text}
    _span(names.OBJECT_SPAN, more | noted, was_cut=was_cut or more_cut)


def emit_exception(error: BaseException, *, attributes: Mapping[str, object] | None = None) -> None:
    """Records an exception that the agent caught; the attempt continues.

    Args:
        error: The exception, recorded with its traceback in OpenTelemetry's format.
        attributes: Further attributes, as for `emit_annotation`.
    """
    from fulmen.spans.recorded import plain_attributes

    more, was_cut = plain_attributes(attributes or {})
    _span(names.EXCEPTION_SPAN, more, was_cut=was_cut, error=error)


def _give(rewards: Mapping[RewardKey, float]) -> None:
    """Passes rewards to the runner, through the attempt's context or the rewards file."""
    context = current()
    if context is None:
        from fulmen.attempt_files import REWARDS_FILE_VARIABLE, append_rewards

        path = os.environ.get(REWARDS_FILE_VARIABLE)
        if path:
            append_rewards(path, rewards.items())
            return
    given = require_current().rewards
    if len(given.keys() | rewards.keys()) > MAX_REWARDS:
        raise RewardInvalid(f"An attempt has at most {MAX_REWARDS} rewards.")
    given.update(rewards)


def _span_id(span: object) -> bytes:
    if isinstance(span, bytes):
        return span
    if isinstance(span, str) and span != CURRENT_SPAN:
        try:
            return bytes.fromhex(span)
        except ValueError:
            raise RewardInvalid(f"Reward span {span!r} is not 16 hexadecimal digits.") from None
    try:
        from opentelemetry import trace
    except ImportError:
        raise RewardInvalid("A span can be scored only where OpenTelemetry is installed.") from None

    if span == CURRENT_SPAN:
        context = trace.get_current_span().get_span_context()
        if not context.is_valid or context.is_remote:
            raise RewardInvalid("No span is open that a reward could score.")
    elif isinstance(span, trace.Span):
        context = span.get_span_context()
    elif isinstance(span, trace.SpanContext):
        context = span
    else:
        span_id = getattr(span, "span_id", None)
        return span_id if isinstance(span_id, bytes) else repr(span).encode()
    return context.span_id.to_bytes(SPAN_ID_BYTES, "big")


def _span(
    name: str,
    attributes: Mapping[str, Any],
    *,
    was_cut: bool = False,
    link: bytes = b"",
    error: BaseException | None = None,
) -> None:
    """Creates a span of zero duration below the open one; none in a Python without OpenTelemetry.

    That is the case in an agent's own virtual environment, for which the runner provides this module.
    """
    try:
        from opentelemetry import trace

        from fulmen.spans.recorded import cut
        from fulmen.spans.tracing import parent_context, tracer
    except ImportError:
        return

    known = dict(attributes)
    step = current_step()
    if step is not None:
        known.setdefault(names.STEP, step)
    if was_cut:
        known[names.TRUNCATED] = True
    parent = parent_context()
    links = []
    if link:
        trace_id = trace.get_current_span(parent).get_span_context().trace_id
        scored = trace.SpanContext(trace_id=trace_id, span_id=int.from_bytes(link, "big"), is_remote=False)
        links = [trace.Link(scored)] if scored.is_valid else []
    span = tracer().start_span(name, context=parent, attributes=known, links=links)
    if error is not None:
        span.record_exception(error)
        span.set_status(trace.StatusCode.ERROR, cut(f"{type(error).__name__}: {error}")[0])
    span.end()


def checked_reward(value: object, *, dimension: str, step: int | None = None, span_id: bytes = b"") -> float:
    """Returns the value of a reward as a float.

    Raises:
        RewardInvalid: If it is not a finite number, or its dimension, step or span is malformed.
    """
    if not isinstance(dimension, str) or not _DIMENSION.fullmatch(dimension):
        raise RewardInvalid(f"Reward dimension {dimension!r} is not 1 to 64 characters of [a-z0-9_.-].")
    if step is not None and (isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < 2**31):
        raise RewardInvalid(f"Reward step {step!r} is not an integer from 0.")
    if span_id and (not isinstance(span_id, bytes) or len(span_id) != SPAN_ID_BYTES or not any(span_id)):
        raise RewardInvalid(f"Reward span {span_id!r} is not eight bytes, or all of them are zero.")
    number = as_number(value)
    if number is None or not math.isfinite(number):
        # A number is quoted as a float: the digits of a huge integer would be useless.
        raise RewardInvalid(f"Reward {dimension!r} is {(value if number is None else number)!r}, not a finite number.")
    return number


def as_number(value: object) -> float | None:
    """Converts a number to a float; None for text and anything else that `float` rejects."""
    if isinstance(value, (str, bytes, bytearray)) or not hasattr(type(value), "__float__"):
        return None
    try:
        return float(value)  # type: ignore[arg-type]  # Checked above: the type defines __float__.
    except OverflowError:
        # An integer too large for a float; invalid as a reward, like infinity.
        return math.inf
    except (TypeError, ValueError, RuntimeError):
        # Arrays and tensors define __float__, but reject it unless they hold one number.
        return None
