"""Entries of the audit log in PostgreSQL."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from fulmen_store.audit.entries import Entry
from fulmen_store.database.database import Database
from fulmen_store.database.queries import arguments

__all__ = ["AuditTable"]


class AuditTable:
    """Reads and adds entries."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def add(self, entries: Sequence[Entry]) -> None:
        """Adds entries; existing ones are skipped."""
        await self._database.fetch("add_audit_entries", *arguments("audit/audit.sql", "entry", entries))

    async def page(
        self,
        *,
        project: str | None,
        first: UUID,
        before: UUID,
        actor: str = "",
        action: str = "",
        errors_only: bool = False,
        limit: int,
    ) -> list[Entry]:
        """Returns entries, newest first, with ids from `first` on and below `before`; empty texts select all."""
        rows = await self._database.fetch(
            "list_audit_entries", project, first, before, actor or None, action or None, errors_only, limit
        )
        return [Entry(**row) for row in rows]
