"""Use cases of annotations: adds, changes and deletes them, and computes how far their authors agree."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final
from uuid import UUID

from fulmen.errors import AnnotationExists, AnnotationNotFound, QuotaExceeded, RolloutNotFound
from fulmen.ids import annotation_name, rollout_name
from fulmen_store.annotations.agreement import Level, alpha, kappa
from fulmen_store.annotations.records import AnnotationView, NewAnnotation
from fulmen_store.annotations.table import AnnotationTable, Score

__all__ = ["Agreement", "Annotations", "AuthorPair", "agreement_of"]

MAX_PER_ROLLOUT: Final = 1000
MAX_SCORES: Final = 100_000
MAX_AUTHORS: Final = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthorPair:
    """How far two authors agree on the rollouts that both scored."""

    author: str
    other: str
    rollout_count: int
    equal_share: float
    kappa: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """How far all authors agree; `authors` are name, number of scores and mean, most scores first."""

    alpha: float | None
    rollout_count: int
    authors: Sequence[tuple[str, int, float]]
    pairs: Sequence[AuthorPair]
    is_truncated: bool


class Annotations:
    """Annotations of projects."""

    def __init__(self, table: AnnotationTable) -> None:
        self._table = table

    async def create(self, new: NewAnnotation, *, project: str) -> AnnotationView:
        """Adds an annotation; returns the one that exists if it has the same content.

        Raises:
            RolloutNotFound: If the rollout does not exist.
            AnnotationExists: If the author has another score of the dimension.
            QuotaExceeded: If the rollout has the maximum number of annotations.
        """
        is_there, view = await self._table.add(new, max_count=MAX_PER_ROLLOUT)
        if not is_there:
            raise RolloutNotFound("The rollout does not exist.", rollout=rollout_name(project, new.rollout_id))
        if view is not None:
            return view
        found = await self._table.of_author(new)
        if found is None:
            text = f"The rollout has {MAX_PER_ROLLOUT} annotations, the maximum. Delete some of them."
            raise QuotaExceeded(text, project=project, quota="annotations")
        if (found.value, found.comment) != (new.value, new.comment):
            text = "You scored this dimension of the rollout before. Update that annotation."
            raise AnnotationExists(text, annotation=annotation_name(project, found.id))
        return found

    async def update(
        self, annotation_id: UUID, project_id: int, project: str, *, author: str | None, value: float, comment: str
    ) -> AnnotationView:
        """Changes an annotation of an author, or with None of anyone.

        Raises:
            AnnotationNotFound: If there is none.
        """
        view = await self._table.update(annotation_id, project_id, author=author, value=value, comment=comment)
        if view is None:
            raise _not_found(project, annotation_id)
        return view

    async def delete(self, annotation_id: UUID, project_id: int, project: str, *, author: str | None) -> None:
        """Deletes an annotation of an author, or with None of anyone.

        Raises:
            AnnotationNotFound: If there is none.
        """
        if not await self._table.delete(annotation_id, project_id, author=author):
            raise _not_found(project, annotation_id)

    async def agreement(self, project_id: int, dimension: str, level: Level) -> Agreement:
        """Returns how far the authors of a dimension agree."""
        scores = await self._table.scores(project_id, dimension, MAX_SCORES)
        # Up to a second of work with the most scores: other calls continue meanwhile.
        return await asyncio.to_thread(agreement_of, scores, level, is_truncated=len(scores) == MAX_SCORES)


def agreement_of(scores: Sequence[Score], level: Level, *, is_truncated: bool = False) -> Agreement:
    """Returns how far the authors of scores agree: the 20 with the most of them."""
    counts = Counter(author for _, author, _ in scores)
    authors = [author for author, _ in sorted(counts.items(), key=lambda each: (-each[1], each[0]))[:MAX_AUTHORS]]
    of_author: dict[str, dict[UUID, float]] = {author: {} for author in authors}
    units: dict[UUID, list[float]] = defaultdict(list)
    for rollout_id, author, value in scores:
        if author in of_author:
            of_author[author][rollout_id] = value
            units[rollout_id].append(value)
    return Agreement(
        alpha=alpha(units.values(), level),
        rollout_count=sum(len(values) > 1 for values in units.values()),
        authors=[(author, len(given), sum(given.values()) / len(given)) for author, given in of_author.items()],
        pairs=[
            _pair(one, other, shared, level)
            for one, other in combinations(authors, 2)
            if (shared := _shared(of_author[one], of_author[other]))
        ],
        is_truncated=is_truncated,
    )


def _shared(one: dict[UUID, float], other: dict[UUID, float]) -> list[tuple[float, float]]:
    return [(value, other[rollout_id]) for rollout_id, value in one.items() if rollout_id in other]


def _pair(one: str, other: str, shared: Sequence[tuple[float, float]], level: Level) -> AuthorPair:
    return AuthorPair(
        author=one,
        other=other,
        rollout_count=len(shared),
        equal_share=sum(first == second for first, second in shared) / len(shared),
        kappa=kappa(shared, level),
    )


def _not_found(project: str, annotation_id: UUID) -> AnnotationNotFound:
    text = "The annotation does not exist, or belongs to another author."
    return AnnotationNotFound(text, annotation=annotation_name(project, annotation_id))
