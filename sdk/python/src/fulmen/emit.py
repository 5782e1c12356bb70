"""Lets an agent that runs inside a runner give rewards while it works.

Invariant: a reward that was emitted reaches the store with the attempt's completion, or not at all. The same dimension
and step emitted again replaces the earlier value. A command reports rewards as its last line of output: a number, or a
JSON object from dimension to number.
"""

import math
import re

from fulmen.agent import FINAL_DIMENSION, require_current

MAX_REWARDS = 256
"""How many rewards an attempt may have."""

SPAN_ID_BYTES = 8

_DIMENSION = re.compile(r"[a-z0-9_.-]{1,64}")


class RewardInvalid(ValueError):
    """A reward is not a finite number, or its dimension or step is malformed."""


def emit_reward(value: float, *, dimension: str = FINAL_DIMENSION, step: int | None = None) -> None:
    """Gives the current attempt a reward.

    Args:
        value: Finite; unitless.
        dimension: 1 to 64 characters of [a-z0-9_.-].
        step: The agent step that it scores, from 0. None scores the whole attempt.

    Raises:
        RewardInvalid: If an argument is out of its range, or the attempt has too many rewards.
        NotInAttempt: If no attempt runs here.
    """
    rewards = require_current().rewards
    key = (dimension, step, b"")
    if len(rewards) >= MAX_REWARDS and key not in rewards:
        raise RewardInvalid(f"An attempt has at most {MAX_REWARDS} rewards.")
    rewards[key] = checked_reward(value, dimension=dimension, step=step)


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
        raise RewardInvalid(f"Reward {dimension!r} is {value!r}, not a finite number.")
    return number


def as_number(value: object) -> float | None:
    """Returns a number as a float, None for anything else; takes what `float` takes, except text."""
    if isinstance(value, (str, bytes, bytearray)) or not hasattr(type(value), "__float__"):
        return None
    try:
        return float(value)  # type: ignore[arg-type]  # Checked above: the type defines __float__.
    except (TypeError, ValueError, OverflowError, RuntimeError):
        # Arrays and tensors define __float__ and refuse it unless they hold one number; integers may be too large.
        return None
