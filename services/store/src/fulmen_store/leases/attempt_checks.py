"""Checks of attempts: whether the holder of an attempt key may still act."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from fulmen_store.rollouts.transitions import AttemptState

__all__ = ["AttemptStatus", "Leases", "RolloutLeases", "Standing", "standing_of"]


class AttemptStatus(IntEnum):
    """Whether an attempt is still its holder's; the numbers are those of `fulmen.store.v1`."""

    LIVE = 1
    ENDED = 2
    STALE_EPOCH = 3
    CANCEL_REQUESTED = 4
    NOT_FOUND = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Leases:
    """The leases of a rollout that are held now: none, one, or two where it is hedged."""

    epochs: frozenset[int] = frozenset()
    cancel_requested: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutLeases:
    """What the tables know of one attempt and its rollout, at one moment.

    Attributes:
        project: `projects/{project}`.
        mode: Number of the rollout's mode, as in `fulmen.store.v1`.
        ended: How the attempt ended; None if it has not, or never was.
    """

    project: str
    mode: int
    leases: Leases
    ended: AttemptState | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """The answer about one attempt; the fields after `status` are empty where it is NOT_FOUND."""

    status: AttemptStatus
    state: AttemptState | None = None
    project: str = ""
    mode: int = 0
    current_epoch: int = 0


_NOT_FOUND = Standing(status=AttemptStatus.NOT_FOUND)


def standing_of(known: RolloutLeases | None, *, number: int, epoch: int) -> Standing:
    """Decides how an attempt stands.

    Args:
        known: State in the tables; None if the rollout does not exist or is not visible to the caller.
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
    return Standing(status=status, state=state, project=known.project, mode=known.mode, current_epoch=current)
