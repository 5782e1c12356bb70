"""Checks of attempts: whether the holder of an attempt key may still act."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from fulmen_store.rollouts.transitions import AttemptState

__all__ = ["AttemptStatus", "Leases", "RolloutLeases", "CheckedAttempt", "check_attempt"]


class AttemptStatus(IntEnum):
    """Status of an attempt for the holder of its key; numbered as in `fulmen.store.v1`."""

    LIVE = 1
    ENDED = 2
    STALE_EPOCH = 3
    CANCEL_REQUESTED = 4
    NOT_FOUND = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Leases:
    """The current leases of a rollout: none, one, or two if it is hedged."""

    epochs: frozenset[int] = frozenset()
    cancel_requested: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutLeases:
    """A snapshot of an attempt and its rollout.

    Attributes:
        project: `projects/{project}`.
        mode: Number of the rollout's mode, as in `fulmen.store.v1`.
        ended: State in which the attempt ended; None if it has not ended or never existed.
        training_run: Name of the rollout's training run; empty without one.
        agent: Version of the rollout's agent; empty without one.
    """

    project: str
    mode: int
    leases: Leases
    ended: AttemptState | None
    training_run: str = ""
    agent: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedAttempt:
    """The result of an attempt check; the fields after `status` are empty if it is NOT_FOUND."""

    status: AttemptStatus
    state: AttemptState | None = None
    project: str = ""
    mode: int = 0
    current_epoch: int = 0
    training_run: str = ""
    agent: str = ""


_NOT_FOUND = CheckedAttempt(status=AttemptStatus.NOT_FOUND)


def check_attempt(known: RolloutLeases | None, *, number: int, epoch: int) -> CheckedAttempt:
    """Determines the status of an attempt.

    Args:
        known: State in the tables; None if the rollout does not exist or the caller may not access it.
        number: Attempt's number, which is the epoch of its lease.
        epoch: Epoch known to the caller; 0 if none.
    """
    if known is None:
        return _NOT_FOUND
    held, current = known.leases.epochs, max(known.leases.epochs, default=0)
    state = AttemptState.RUNNING if number in held else known.ended
    if state is None:
        return _NOT_FOUND
    if epoch not in (0, number):
        status = AttemptStatus.STALE_EPOCH
    elif number in held:
        status = AttemptStatus.CANCEL_REQUESTED if known.leases.cancel_requested else AttemptStatus.LIVE
    else:
        status = AttemptStatus.STALE_EPOCH if current > number else AttemptStatus.ENDED
    return CheckedAttempt(
        status=status,
        state=state,
        project=known.project,
        mode=known.mode,
        current_epoch=current,
        training_run=known.training_run,
        agent=known.agent,
    )
