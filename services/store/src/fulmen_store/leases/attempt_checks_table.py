"""How attempts stand, in PostgreSQL."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from fulmen_store.database.database import Database, columns
from fulmen_store.leases.attempt_checks import Leases, RolloutLeases
from fulmen_store.rollouts.transitions import AttemptState

__all__ = ["PgAttemptChecks"]


class PgAttemptChecks:
    """Implements `AttemptCheckTable`."""

    def __init__(self, database: Database) -> None:
        """Takes the database."""
        self._database = database

    async def look(self, attempts: Sequence[tuple[UUID, int]]) -> list[RolloutLeases | None]:
        """Returns what is known of each attempt (rollout, number), in order; None where there is no such rollout."""
        found: list[RolloutLeases | None] = [None] * len(attempts)
        for row in await self._database.fetch("check_attempts", *columns(attempts, 2)):
            held = [epoch for epoch in (row["lease_epoch"], row["hedge_epoch"]) if epoch is not None]
            found[row["n"] - 1] = RolloutLeases(
                project=row["project"],
                mode=row["mode"],
                leases=Leases(epochs=frozenset(held), cancel_requested=bool(row["cancel_requested"])),
                ended=None if row["state"] is None else AttemptState(row["state"]),
            )
        return found
