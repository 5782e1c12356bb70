"""Annotations as the store keeps them."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from uuid import UUID

__all__ = ["AnnotationView", "NewAnnotation"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NewAnnotation:
    """An annotation to add; its fields were checked."""

    project_id: int
    rollout_id: UUID
    dimension: str
    author: str
    value: float
    comment: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnotationView:
    """A stored annotation."""

    id: UUID
    rollout_id: UUID
    dimension: str
    author: str
    value: float
    comment: str
    created_at: datetime.datetime
    updated_at: datetime.datetime
