"""Dead rollouts that were not run again yet, in PostgreSQL."""

from __future__ import annotations

from typing import Final
from uuid import UUID

from fulmen_store.database.database import Database
from fulmen_store.rollouts.filter import Expression
from fulmen_store.rollouts.lists import compiled
from fulmen_store.rollouts.records import DeadRollout

__all__ = ["DeadLetterTable"]

WINDOW_ROWS: Final = 5000
LOWEST_ID: Final = UUID(int=0)
HIGHEST_ID: Final = UUID(int=2**128 - 1)


class DeadLetterTable:
    """Implements `DeadLetterTable`."""

    def __init__(self, database: Database, *, window_rows: int = WINDOW_ROWS) -> None:
        """Takes the database; `window_rows` is how many rows one statement looks at, at most."""
        self._database = database
        self._window_rows = window_rows

    async def retryable(
        self, project_id: int, run_id: int | None, *, where: Expression | None, limit: int
    ) -> list[DeadRollout]:
        """Returns the oldest dead rollouts that `where` selects and that were not run again."""
        found: list[DeadRollout] = []
        lower: UUID | None = LOWEST_ID
        while lower is not None and len(found) < limit:
            row = await self._database.fetch_row("retryable_window", project_id, lower, self._window_rows - 1)
            upper = None if row is None else row["id"]
            arguments = (project_id, lower, upper or HIGHEST_ID, limit - len(found), run_id)
            condition, values = compiled(where, first=len(arguments) + 1)
            found += [
                DeadRollout(rollout_id=row["id"], size_bytes=row["size_bytes"])
                for row in await self._database.fetch_filtered(
                    "list_retryable_rollouts", condition, *arguments, *values
                )
            ]
            lower = upper
        return found
