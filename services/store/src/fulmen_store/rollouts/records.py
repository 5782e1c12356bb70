"""Values passed between the use cases of the queue and the table of rollouts."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final
from uuid import UUID

from fulmen.errors import FulmenError
from fulmen_store.rollouts.transitions import AttemptState, FailureKind, RolloutState

__all__ = [
    "NO_RUN",
    "AttemptView",
    "CancelOutcome",
    "Cancelled",
    "DeadRollout",
    "NameKind",
    "RolloutAppeared",
    "RolloutRetried",
    "RolloutView",
    "RunningAttempt",
]


# The number of no training run.
NO_RUN: Final = 0


class RolloutAppeared(FulmenError):
    """A rollout of the same id was created concurrently; nothing was written."""


class RolloutRetried(FulmenError):
    """A dead rollout was run again concurrently; nothing was written."""


class NameKind(IntEnum):
    """The kind of an interned name."""

    TASK_TYPE = 1
    AGENT = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningAttempt:
    """A running attempt.

    Attributes:
        progress: Stored `AttemptProgress` message that its agent reported last; empty without one.
        timeout_ms: How long it may run by its policy, milliseconds; None if it is a hedged one.
    """

    number: int
    session_id: UUID
    host: str
    started_at: datetime.datetime
    progress: bytes = b""
    timeout_ms: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptView:
    """An ended attempt, and the state that its end gave the rollout."""

    number: int
    state: AttemptState
    failure_kind: FailureKind
    rollout_state: RolloutState
    session_id: UUID
    host: str
    started_at: datetime.datetime
    ended_at: datetime.datetime
    report: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutView:
    """A snapshot of a rollout.

    Attributes:
        project: Name of its project.
        request: The stored `Rollout` message, as requested.
        running: Running attempts by number: one, two if the rollout is hedged, or none.
        ended: The latest ended attempts, if requested.
        ended_attempts: Number of ended attempts; set in lists, and with `ended`.
        priority: Priority.
        reward: Final reward of the attempt that decided the state; None without one.
        duration_s: Duration of that attempt, seconds; None without one.
        failure_message: What failed in that attempt, in one line; empty if nothing did.
        prompt_token_count: Prompt tokens of the calls of all attempts; None if not requested or none is reported.
        completion_token_count: Tokens sampled for all attempts; None likewise.
        cost_micros: Cost of the calls of all attempts, millionths of a US dollar; None likewise.
        retry_at: When it may run again, if it waits for a retry.
    """

    rollout_id: UUID
    project_id: int
    project: str
    request: bytes
    state: RolloutState
    failure_kind: FailureKind
    created_at: datetime.datetime
    ended_at: datetime.datetime | None
    running: Sequence[RunningAttempt]
    ended: Sequence[AttemptView] = ()
    ended_attempts: int = 0
    priority: int = 0
    reward: float | None = None
    duration_s: float | None = None
    failure_message: str = ""
    prompt_token_count: int | None = None
    completion_token_count: int | None = None
    cost_micros: int | None = None
    retry_at: datetime.datetime | None = None

    @property
    def token_count(self) -> int | None:
        """Prompt tokens and sampled ones together; None likewise."""
        if self.prompt_token_count is None or self.completion_token_count is None:
            return None
        return self.prompt_token_count + self.completion_token_count


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancelled:
    """A cancelled rollout; without a session it was waiting and is now final."""

    rollout_id: UUID
    project_id: int
    session_id: UUID | None
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelOutcome:
    """The number of rollouts cancelled immediately, and of those whose runners were asked to stop."""

    cancelled: int
    cancelling: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadRollout:
    """A failed rollout that was not run again, and the size of its request."""

    rollout_id: UUID
    size_bytes: int
