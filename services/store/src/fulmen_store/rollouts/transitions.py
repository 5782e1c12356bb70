"""The state machine: the transitions of rollouts, and the rule that decides how an attempt ends.

Invariant: a final state never changes. The numbers are those of `fulmen.store.v1`; the CHECK constraint
`attempt_end_is_legal` of the schema states the same set as `ATTEMPT_ENDS`, which a test compares.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Final

__all__ = [
    "ATTEMPT_ENDS",
    "FINAL_STATES",
    "TRANSITIONS",
    "AttemptState",
    "Decision",
    "FailureKind",
    "RetryPolicy",
    "RolloutState",
    "decide",
]

MAX_BACKOFF_MS: Final = 60_000
JITTER: Final = 0.25
MAX_DELAY_S: Final = MAX_BACKOFF_MS * (1 + JITTER) / 1000
_MAX_DOUBLINGS: Final = 16
MAX_LOST_RUNNERS: Final = 2
"""Runners that a rollout may lose. From then on it runs alone on its runner, and is not retried if that one dies too."""


class RolloutState(IntEnum):
    """The state of a rollout."""

    QUEUED = 1
    RUNNING = 2
    RETRY_WAIT = 3
    SUCCEEDED = 4
    FAILED = 5
    CANCELLED = 6


class AttemptState(IntEnum):
    """The state of an attempt."""

    RUNNING = 1
    SUCCEEDED = 2
    FAILED = 3


class FailureKind(IntEnum):
    """Why an attempt did not succeed; NONE if it did."""

    NONE = 0
    AGENT_ERROR = 1
    TIMEOUT = 2
    LEASE_LOST = 3
    INFRA = 4
    REWARD_MISSING = 5
    CANCELLED = 6
    RELEASED = 7
    SUPERSEDED = 8
    RUNNER_LOST = 9


FINAL_STATES: Final = frozenset({RolloutState.SUCCEEDED, RolloutState.FAILED, RolloutState.CANCELLED})

TRANSITIONS: Final = frozenset(
    {
        (RolloutState.QUEUED, RolloutState.RUNNING),
        (RolloutState.QUEUED, RolloutState.CANCELLED),
        (RolloutState.QUEUED, RolloutState.FAILED),
        (RolloutState.RUNNING, RolloutState.SUCCEEDED),
        (RolloutState.RUNNING, RolloutState.FAILED),
        (RolloutState.RUNNING, RolloutState.CANCELLED),
        (RolloutState.RUNNING, RolloutState.RETRY_WAIT),
        (RolloutState.RETRY_WAIT, RolloutState.QUEUED),
        (RolloutState.RETRY_WAIT, RolloutState.CANCELLED),
        (RolloutState.RETRY_WAIT, RolloutState.FAILED),
    }
)

_DECIDING_KINDS: Final = (
    FailureKind.AGENT_ERROR,
    FailureKind.TIMEOUT,
    FailureKind.LEASE_LOST,
    FailureKind.INFRA,
    FailureKind.REWARD_MISSING,
)

ATTEMPT_ENDS: Final = frozenset(
    {(AttemptState.SUCCEEDED, FailureKind.NONE, RolloutState.SUCCEEDED)}
    | {(AttemptState.FAILED, FailureKind.SUPERSEDED, RolloutState.SUCCEEDED)}
    | {(AttemptState.FAILED, kind, RolloutState.RUNNING) for kind in (*_DECIDING_KINDS, FailureKind.RELEASED)}
    | {(AttemptState.FAILED, kind, RolloutState.FAILED) for kind in (*_DECIDING_KINDS, FailureKind.RUNNER_LOST)}
    | {(AttemptState.FAILED, kind, RolloutState.RETRY_WAIT) for kind in (*_DECIDING_KINDS, FailureKind.RELEASED)}
    | {(AttemptState.SUCCEEDED, FailureKind.NONE, RolloutState.CANCELLED)}
    | {(AttemptState.FAILED, kind, RolloutState.CANCELLED) for kind in FailureKind if kind is not FailureKind.NONE}
)

_DEFAULT_MASK: Final = 1 << FailureKind.LEASE_LOST | 1 << FailureKind.INFRA
_NEVER_LISTED: Final = frozenset(
    {
        FailureKind.NONE,
        FailureKind.CANCELLED,
        FailureKind.RELEASED,
        FailureKind.SUPERSEDED,
        FailureKind.RUNNER_LOST,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """The rule for retries.

    Attributes:
        max_attempts: Maximum number of counted attempts, 1 to 100.
        retry_mask: Bit `1 << kind` for each failure kind that is retried.
        backoff_ms: Wait before the second attempt, 0 to 60,000 ms; it doubles with each further one.
    """

    max_attempts: int
    retry_mask: int
    backoff_ms: int

    @staticmethod
    def mask_of(kinds: frozenset[FailureKind]) -> int:
        """Packs kinds into a mask; an empty set means the default, LEASE_LOST and INFRA."""
        if not kinds:
            return _DEFAULT_MASK
        return sum(1 << kind for kind in kinds - _NEVER_LISTED)

    def retries(self, kind: FailureKind) -> bool:
        """Returns True if this kind is retried while the budget lasts."""
        return bool(self.retry_mask & (1 << kind))


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The effect of an ended attempt on its rollout.

    Attributes:
        rollout_state: RETRY_WAIT, a final state, or RUNNING if another attempt continues.
        delay_s: Seconds until the rollout may run again; 0 if it is final.
        charge: Attempts to count against the budget, 0 or 1.
        kind: Failure kind to store instead of the reported one; None to store that.
    """

    rollout_state: RolloutState
    delay_s: float = 0.0
    charge: int = 1
    kind: FailureKind | None = None


def decide(
    kind: FailureKind,
    *,
    policy: RetryPolicy,
    charged: int,
    cancel_requested: bool,
    hedged: bool = False,
    jitter: float = 0.0,
    time_left_s: float | None = None,
    lost_runners: int = 0,
    was_alone: bool = False,
) -> Decision:
    """Decides the effect of an ended attempt on its rollout.

    Args:
        kind: Why the attempt failed; NONE if it succeeded.
        policy: Rollout's policy.
        charged: Attempts already counted against the budget, without this one.
        cancel_requested: Whether a caller asked to cancel the rollout while the attempt ran.
        hedged: Whether another attempt of the rollout runs. A failure then decides and costs nothing; of the two, the
            last one to fail counts for both.
        jitter: A number in [-1, 1] that spreads the back-off by up to 25 %.
        time_left_s: Seconds until the rollout's deadline, below 0 if it has passed; None if it has none. No retry
            is scheduled past it.
        lost_runners: Runners that died under the rollout, with this one if its runner did.
        was_alone: Whether the runner died while this attempt was the only one that it ran. Only then is it known which
            attempt the runner died of.
    """
    if cancel_requested or kind is FailureKind.CANCELLED:
        return Decision(rollout_state=RolloutState.CANCELLED)
    if kind is FailureKind.NONE:
        return Decision(rollout_state=RolloutState.SUCCEEDED)
    if hedged:
        return Decision(rollout_state=RolloutState.RUNNING, charge=0)
    if kind is FailureKind.RELEASED:
        return Decision(rollout_state=RolloutState.RETRY_WAIT, charge=0)
    is_last = not policy.retries(kind) or charged + 1 >= policy.max_attempts
    if kind is FailureKind.LEASE_LOST and was_alone and (is_last or lost_runners >= MAX_LOST_RUNNERS):
        return Decision(rollout_state=RolloutState.FAILED, kind=FailureKind.RUNNER_LOST)
    if is_last:
        return Decision(rollout_state=RolloutState.FAILED)
    backoff_ms = min(MAX_BACKOFF_MS, policy.backoff_ms * 2 ** min(charged, _MAX_DOUBLINGS))
    delay_s = backoff_ms * (1 + JITTER * jitter) / 1000
    if time_left_s is not None and delay_s >= time_left_s:
        return Decision(rollout_state=RolloutState.FAILED)
    return Decision(rollout_state=RolloutState.RETRY_WAIT, delay_s=delay_s)
