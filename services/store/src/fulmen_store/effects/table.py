"""Effects in PostgreSQL."""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID

from fulmen_store.database.database import Database

__all__ = ["EffectKey", "EffectTable", "EffectView"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EffectKey:
    """The names of an effect."""

    project_id: int
    rollout_id: UUID
    name: str
    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EffectView:
    """An effect: the attempt and the execution that began it, and its result, JSON; None until it is known."""

    attempt: int
    token: str
    result: bytes | None


class EffectTable:
    """Reads and writes effects."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def begin(self, effect: EffectKey, *, attempt: int, token: str, max_count: int) -> EffectView | None:
        """Begins an effect, unless it was begun; returns it, or None if it was not, and the attempt holds no lease.

        Nothing is begun in a rollout with `max_count` effects, however many begin at the same time.
        """
        async with self._database.transaction() as transaction:
            await transaction.fetch("lock_effects", effect.rollout_id)
            row = await transaction.fetch_row(
                "begin_effect", effect.rollout_id, effect.name, effect.key, attempt, token, effect.project_id, max_count
            )
        return await self.find(effect) if row is None else EffectView(**row)

    async def find(self, effect: EffectKey) -> EffectView | None:
        """Returns an effect; None if it was not begun."""
        row = await self._database.fetch_row(
            "effect_of_rollout", effect.rollout_id, effect.name, effect.key, effect.project_id
        )
        return None if row is None else EffectView(**row)

    async def count(self, rollout_id: UUID) -> int:
        """Returns the number of effects of a rollout."""
        row = await self._database.fetch_row("count_effects", rollout_id)
        return 0 if row is None else int(row["count"])

    async def end(self, effect: EffectKey, *, token: str, result: bytes) -> None:
        """Records the result of an effect that was begun with this token, unless one is recorded."""
        await self._database.fetch("end_effect", effect.rollout_id, effect.name, effect.key, token, result)
