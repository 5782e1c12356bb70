"""Annotations in PostgreSQL."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from fulmen.ids import uuid7
from fulmen_store.annotations.records import AnnotationView, NewAnnotation
from fulmen_store.database.database import Database

__all__ = ["AnnotationTable", "Score"]

Score = tuple[UUID, str, float]
"""Rollout, author and value."""


class AnnotationTable:
    """Reads and writes annotations."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def add(self, new: NewAnnotation, *, max_count: int) -> tuple[bool, AnnotationView | None]:
        """Adds an annotation unless its author has one of the dimension; returns whether the rollout exists, and what was added.

        Nothing is added to a rollout with `max_count` annotations.
        """
        async with self._database.transaction() as transaction:
            if await transaction.fetch_row("hold_annotated", new.rollout_id, new.project_id) is None:
                return False, None
            row = await transaction.fetch_row(
                "add_annotation", uuid7(), new.project_id, new.rollout_id, new.dimension, new.author, new.value,
                new.comment, max_count,
            )  # fmt: skip
        return True, None if row is None else AnnotationView(**row)

    async def of_author(self, new: NewAnnotation) -> AnnotationView | None:
        """Returns the annotation that its author has of the rollout's dimension; None if there is none."""
        row = await self._database.fetch_row("annotation_of_author", new.rollout_id, new.dimension, new.author)
        return None if row is None else AnnotationView(**row)

    async def update(
        self, annotation_id: UUID, project_id: int, *, author: str | None, value: float, comment: str
    ) -> AnnotationView | None:
        """Changes an annotation; returns None if there is none, or it is not the author's."""
        row = await self._database.fetch_row("update_annotation", annotation_id, project_id, author, value, comment)
        return None if row is None else AnnotationView(**row)

    async def delete(self, annotation_id: UUID, project_id: int, *, author: str | None) -> bool:
        """Deletes an annotation; returns False if there is none, or it is not the author's."""
        return await self._database.fetch_row("delete_annotation", annotation_id, project_id, author) is not None

    async def page(
        self, project_id: int, *, before: UUID, rollout_id: UUID | None, author: str, dimension: str, limit: int
    ) -> list[AnnotationView]:
        """Returns annotations with ids below `before`, newest first; an empty author or dimension selects all."""
        rows = await self._database.fetch(
            "list_annotations", project_id, before, rollout_id, author or None, dimension or None, limit
        )
        return [AnnotationView(**row) for row in rows]

    async def scores(self, project_id: int, dimension: str, limit: int) -> Sequence[Score]:
        """Returns the newest scores of a dimension."""
        rows = await self._database.fetch("scores_of_dimension", project_id, dimension, limit)
        return [(row["rollout_id"], row["author"], row["value"]) for row in rows]
