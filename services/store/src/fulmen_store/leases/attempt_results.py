"""Validation of a runner's report of an attempt."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from fulmen_store.rollouts.transitions import FailureKind

__all__ = ["MAX_MESSAGE_CHARS", "RewardValue", "result_problem"]

MAX_REWARDS: Final = 256
MAX_OUTPUT_BYTES: Final = 64 * 1024
MAX_MESSAGE_CHARS: Final = 4096
SPAN_ID_BYTES: Final = 8
_DIMENSION: Final = re.compile(r"[a-z0-9_.-]{1,64}")
_KNOWN: Final = frozenset(FailureKind)
_REFUSED: Final = frozenset({FailureKind.LEASE_LOST, FailureKind.RELEASED, FailureKind.SUPERSEDED})


# Treated as immutable, but not frozen: one is created for every rollout, and freezing makes that four times slower.
@dataclass(slots=True, kw_only=True)
class RewardValue:
    """A reward; without a step and a span, it scores the whole attempt."""

    dimension: str
    value: float
    step: int | None
    span_id: bytes = b""


def result_problem(*, kind: int, rewards: Sequence[RewardValue], output_size: int) -> str:
    """Returns a description of the problem with a report; empty if it is valid."""
    if kind not in _KNOWN:
        return f"failure_kind {kind} is not known"
    if kind in _REFUSED:
        return f"failure_kind {FailureKind(kind).name} is set by the store only"
    if output_size > MAX_OUTPUT_BYTES:
        return f"output has {output_size} bytes, at most {MAX_OUTPUT_BYTES} are allowed"
    if len(rewards) > MAX_REWARDS:
        return f"there are {len(rewards)} rewards, at most {MAX_REWARDS} are allowed"
    for reward in rewards:
        if not _DIMENSION.fullmatch(reward.dimension):
            return "a reward's dimension is not 1 to 64 characters of [a-z0-9_.-]"
        if not math.isfinite(reward.value):
            return f"the reward {reward.dimension} is not a finite number"
        if reward.step is not None and reward.step < 0:
            return f"the reward {reward.dimension} has a negative step"
        if len(reward.span_id) not in (0, SPAN_ID_BYTES):
            return f"the reward {reward.dimension} has a span_id that is not {SPAN_ID_BYTES} bytes"
    if len({(reward.dimension, reward.step, reward.span_id) for reward in rewards}) != len(rewards):
        return "two rewards have the same dimension, step and span"
    return ""
