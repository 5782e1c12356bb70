"""Reports of ended attempts: checked, and from and to protobuf."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final
from uuid import UUID

from fulmen.ids import AttemptName
from fulmen.store.v1 import attempt_pb2, lease_pb2
from fulmen_store.database.stored import UNREADABLE
from fulmen_store.leases.leases import AttemptReport, Grant
from fulmen_store.rollouts.transitions import FailureKind

__all__ = [
    "MAX_PRINTED_BYTES",
    "MAX_PROGRESS_BYTES",
    "MAX_REPORT_BYTES",
    "explained",
    "failure_line",
    "report_of",
    "unreadable_report",
]

MAX_REWARDS: Final = 256
MAX_OUTPUT_BYTES: Final = 64 * 1024
MAX_MESSAGE_BYTES: Final = 4096
MAX_CONTENT_TYPE: Final = 128
# Above what the limits of its fields allow, names of rewards included.
MAX_REPORT_BYTES: Final = 112 * 1024
# Above 200 characters of four bytes, with fields that the store does not know.
MAX_PROGRESS_BYTES: Final = 2048
# Of standard output and of standard error; the rest is the encoding.
MAX_STREAM_BYTES: Final = 32 * 1024
MAX_PRINTED_BYTES: Final = 2 * MAX_STREAM_BYTES + 1024
SPAN_ID_BYTES: Final = 8
FINAL_DIMENSION: Final = "reward"
MAX_LINE_CHARS: Final = 200
TRACEBACK: Final = "Traceback (most recent call last):"
# The line of a failure in the output of a program: `ValueError: ...`, `java.lang.IllegalStateException`.
_ERROR: Final = re.compile(r"(?:Uncaught |Exception in thread \S+ )?[\w.$]*(?:Error|Exception)\b")
_DIMENSION: Final = re.compile(r"[a-z0-9_.-]{1,64}")
_REFUSED: Final = frozenset(
    {FailureKind.LEASE_LOST, FailureKind.RELEASED, FailureKind.SUPERSEDED, FailureKind.RUNNER_LOST}
)


_KINDS = {kind.value: kind for kind in FailureKind}


# Treated as immutable, but not frozen: one is created for every rollout, and freezing makes that four times slower.
@dataclass(slots=True, kw_only=True)
class _Reward:
    """A reward; without a step and a span, it scores the whole attempt."""

    dimension: str
    value: float
    step: int | None
    span_id: bytes = b""


def explained(text: str) -> bytes:
    """Encodes the stored report of an attempt that the store ended."""
    return attempt_pb2.Attempt(failure_message=text).SerializeToString(deterministic=True)


def failure_line(text: str) -> str | None:
    """Returns what failed, in one line of at most 200 characters; None for an empty message.

    That is the exception of the last traceback in a message, or its first line; of a program that ended with an error
    also the line of its output that names the error.
    """
    head, *parts = text.split(TRACEBACK)
    lines = [line for line in head.splitlines() if line.strip()]
    # A message that was truncated at the front may begin inside a traceback.
    first = next((line for line in lines if not line[0].isspace()), lines[0] if lines else "")
    if parts:
        after = [line for line in parts[-1].splitlines() if line.strip()]
        found = next((line for line in after if not line[0].isspace()), after[-1] if after else "")
    else:
        found = next((line for line in lines[1:] if _ERROR.match(line)), "") if "exited with" in first else ""
    words = [word.strip(" |+-") for word in (first, found) if word]
    line = " ".join(words) if first.rstrip().endswith(":") else ": ".join(words)
    shown = "".join(sign if sign.isprintable() else " " for sign in line).strip()
    return (shown if len(shown) <= MAX_LINE_CHARS else shown[: MAX_LINE_CHARS - 1] + "…") or None


def report_of(result: lease_pb2.AttemptResult, attempt: AttemptName, *, project_id: int) -> AttemptReport | str:
    """Decodes a runner's report of an attempt; returns a description of the problem if it is malformed."""
    rewards = [
        _Reward(
            dimension=reward.dimension or FINAL_DIMENSION,
            value=reward.value,
            step=reward.step if reward.HasField("step") else None,
            span_id=reward.span_id,
        )
        for reward in result.rewards
    ]
    problem = _problem(kind=result.failure_kind, rewards=rewards, output_size=len(result.output))
    if not problem and len(result.output_content_type) > MAX_CONTENT_TYPE:
        problem = f"output_content_type is longer than {MAX_CONTENT_TYPE} characters"
    if problem:
        return problem
    if attempt.number != result.epoch:
        return "epoch differs from the assignment's"
    session_id = _session_id(result.lease_id)
    if session_id is None:
        return "lease_id differs from the assignment's"
    report = attempt_pb2.Attempt(
        failure_message=_shortened(result.failure_message),
        rewards=result.rewards,
        output=result.output,
        output_content_type=result.output_content_type,
    )
    for reward in report.rewards:
        if not reward.dimension:
            reward.dimension = FINAL_DIMENSION
    # Fields that the store does not know are kept with those that it knows.
    stored = report.SerializeToString(deterministic=True)
    if len(stored) > MAX_REPORT_BYTES:
        return f"the result has {len(stored)} bytes, at most {MAX_REPORT_BYTES} are allowed"
    return AttemptReport(
        project_id=project_id,
        rollout_id=attempt.rollout_id,
        session_id=session_id,
        epoch=attempt.number,
        kind=_KINDS[result.failure_kind],
        report=stored,
        reward=_final(rewards),
        failure=failure_line(report.failure_message) if result.failure_kind else None,
        printed=_printed(result.printed) if result.HasField("printed") else None,
    )


def unreadable_report(grant: Grant) -> AttemptReport:
    """Returns the end of an attempt whose stored request is unreadable; nothing that its runner did failed."""
    return AttemptReport(
        project_id=grant.project_id,
        rollout_id=grant.rollout_id,
        session_id=grant.session_id,
        epoch=grant.epoch,
        kind=FailureKind.INFRA,
        report=explained(UNREADABLE),
        failure=failure_line(UNREADABLE),
    )


def _printed(printed: attempt_pb2.PrintedTail) -> bytes | None:
    """Encodes the end of what an agent printed, as much as may be stored; None if there is nothing."""
    kept = attempt_pb2.PrintedTail(
        stdout=_shortened(printed.stdout, MAX_STREAM_BYTES), stderr=_shortened(printed.stderr, MAX_STREAM_BYTES)
    )
    return kept.SerializeToString(deterministic=True) or None


def _shortened(text: str, limit_bytes: int = MAX_MESSAGE_BYTES) -> str:
    """Returns the end of a text, as much as may be stored."""
    if len(text) * 4 <= limit_bytes or len(encoded := text.encode()) <= limit_bytes:
        return text
    return encoded[-limit_bytes:].decode(errors="ignore")


def _final(rewards: Sequence[_Reward]) -> float | None:
    """Returns the final reward of the attempt; None without one."""
    for reward in rewards:
        if reward.step is None and not reward.span_id and reward.dimension == FINAL_DIMENSION:
            return reward.value
    return None


def _problem(*, kind: int, rewards: Sequence[_Reward], output_size: int) -> str:
    """Returns a description of the problem with a report; empty if it is valid."""
    if kind not in _KINDS:
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


@lru_cache(maxsize=4096)
def _session_id(lease_id: str) -> UUID | None:
    try:
        return UUID(lease_id)
    except ValueError:
        return None
