"""Load and attempt counts of runner sessions, kept until the next renewal; a killed replica loses a few seconds of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final
from uuid import UUID

from fulmen_store.leases.leases import EndedAttempt
from fulmen_store.rollouts.transitions import FailureKind

__all__ = [
    "SessionUpdate",
    "SessionUpdates",
]

_NOT_COUNTED: Final = frozenset({FailureKind.CANCELLED, FailureKind.RELEASED, FailureKind.SUPERSEDED})


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionUpdate:
    """A pending update of a session.

    Attributes:
        active: Whether the runner was active, which extends the session.
        load: Reported load, opaque here; None keeps the previous one.
        ended: Number of its attempts that ended since the last update.
        failed: Number of those that failed.
    """

    session_id: UUID
    active: bool
    load: bytes | None = None
    ended: int = 0
    failed: int = 0


@dataclass(slots=True)
class _Note:
    load: bytes | None = None
    ended: int = 0
    failed: int = 0


class SessionUpdates:
    """The pending updates of sessions, written with the next renewal."""

    def __init__(self) -> None:
        self._notes: dict[UUID, _Note] = {}

    def load(self, session_id: UUID, load: bytes) -> None:
        """Records the load that a runner reported."""
        self._notes.setdefault(session_id, _Note()).load = load

    def ended(self, attempts: Iterable[EndedAttempt]) -> None:
        """Counts ended attempts; released, cancelled and superseded ones do not count."""
        for attempt in attempts:
            if attempt.kind not in _NOT_COUNTED:
                note = self._notes.setdefault(attempt.session_id, _Note())
                note.ended += 1
                note.failed += attempt.kind is not FailureKind.NONE

    def drain(self, active: Iterable[UUID]) -> list[SessionUpdate]:
        """Removes and returns the updates of active sessions and of those with pending counts."""
        notes, self._notes = self._notes, {}
        alive = set(active)
        empty = _Note()
        return [
            SessionUpdate(
                session_id=session_id,
                active=session_id in alive,
                load=(note := notes.get(session_id, empty)).load,
                ended=note.ended,
                failed=note.failed,
            )
            for session_id in sorted(alive | notes.keys())
        ]

    def restore(self, signs: Iterable[SessionUpdate]) -> None:
        """Restores updates that could not be written; newer values win."""
        for sign in signs:
            if sign.load is None and not sign.ended:
                continue
            note = self._notes.setdefault(sign.session_id, _Note())
            note.load = sign.load if note.load is None else note.load
            note.ended += sign.ended
            note.failed += sign.failed
