"""What the store's own timers look at, in PostgreSQL."""

from __future__ import annotations

from fulmen_store.database.database import Database
from fulmen_store.leases.overdue import OverdueAttempt, OverdueReason

__all__ = ["PgOverdue"]


class PgOverdue:
    """Implements `OverdueTable`."""

    def __init__(self, database: Database) -> None:
        """Takes the database."""
        self._database = database

    async def overdue(self, *, attempt_grace_s: float, limit: int) -> list[OverdueAttempt]:
        """Returns leases whose attempt is past its timeout and a grace, its cancel grace or its deadline."""
        return [
            OverdueAttempt(
                rollout_id=row["id"],
                session_id=row["session"],
                epoch=row["epoch"],
                reason=OverdueReason(row["reason"]),
            )
            for row in await self._database.fetch("overdue_attempts", attempt_grace_s, limit)
        ]

    async def fail_waiting(self, limit: int) -> list[int]:
        """Ends waiting rollouts whose deadline has passed, in one commit; returns the project of each."""
        return [row["project_id"] for row in await self._database.fetch("fail_overdue_rollouts", limit)]
