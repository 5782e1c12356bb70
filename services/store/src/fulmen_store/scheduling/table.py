"""Counts, terms and durations of the queue in PostgreSQL."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final
from uuid import UUID

import asyncpg

from fulmen_store.database.database import Database, columns
from fulmen_store.runners.demand import WaitingWork
from fulmen_store.scheduling.duration_sketch import DurationSketch
from fulmen_store.scheduling.rules import QueueTerms
from fulmen_store.scheduling.rules_codec import decode_rules

__all__ = [
    "DemandTable",
    "DurationTable",
    "LabelCount",
    "ListedQueue",
    "PausedAgent",
    "PriorityCount",
    "ProjectQueue",
    "QueueCount",
    "QueueStats",
    "QueueStatsTable",
    "TaskTypeDurations",
    "terms_of",
]

# A project may have very many task types; only the most frequent of the newest are returned.
TASK_TYPES_CONSIDERED: Final = 1000
TASK_TYPES_SHOWN: Final = 100
PAUSED_AGENTS_SHOWN: Final = 100
LABELS_SHOWN: Final = 100


class QueueStatsTable:
    """Counts the rollouts of projects and training runs."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def queued(self, project_id: int) -> QueueCount:
        """Returns the number of waiting rollouts of a project, if it has a quota."""
        row = await self._database.fetch_row("count_queued", project_id)
        if row is None:
            return QueueCount(max_queued=None, queued=0)
        return QueueCount(max_queued=row["max_queued"], queued=row["queued"])

    async def stats(self, project_id: int, run_id: int | None) -> QueueStats:
        """Counts the live rollouts of a project or training run."""
        queue = await self.queue(project_id)
        rows = await self._database.fetch("count_by_priority", project_id, run_id)
        types = await self._database.fetch("frequent_task_types", project_id, TASK_TYPES_CONSIDERED, TASK_TYPES_SHOWN)
        paused = await self._database.fetch("paused_agents", project_id, PAUSED_AGENTS_SHOWN)
        labels = await self._database.fetch("count_by_labels", project_id, run_id, LABELS_SHOWN)
        return QueueStats(
            priorities=[
                PriorityCount(
                    priority=-row["sort_priority"],
                    queued=row["queued"],
                    running=row["running"],
                    delayed=row["delayed"],
                    oldest_age_s=row["oldest_age_s"],
                )
                for row in rows
            ],
            task_types=[_durations(row) for row in types],
            queue=queue,
            paused_agents=[
                PausedAgent(agent=row["agent"], paused_at=row["paused_at"], rollouts=row["rollouts"]) for row in paused
            ],
            labels=[
                LabelCount(labels=frozenset(row["labels"] or ()), queued=row["queued"], running=row["running"])
                for row in labels
            ],
        )

    async def queue(self, project_id: int) -> ProjectQueue:
        """Returns by which terms a project's queue is served, and by how many runners; reads no rollout."""
        row = await self._database.fetch_row("queue_terms", project_id)
        assert row is not None
        return ProjectQueue(
            project=row["name"],
            terms=terms_of(row),
            runners=row["runners"],
            paused_at=row["paused_at"],
            pause_reason=row["pause_reason"],
        )

    async def queues(self, *, after: str, only: str | None, limit: int) -> list[ListedQueue]:
        """Returns queues ordered by project, after a project; with `only`, at most that one."""
        return [
            ListedQueue(
                project=row["name"],
                terms=terms_of(row),
                queued=row["queued"],
                running=row["running"],
                paused_at=row["paused_at"],
                pause_reason=row["pause_reason"],
            )
            for row in await self._database.fetch("list_queues", after, only, limit)
        ]


class DemandTable:
    """Counts the work for fleet demand."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def fold(self) -> None:
        """Adds up the kept counts, so that there are not many more of them than kinds of rollouts."""
        await self._database.fetch("fold_counts")

    async def work(self) -> list[WaitingWork]:
        """Counts all live rollouts."""
        return [
            WaitingWork(
                project=row["project"],
                max_running=row["max_running"],
                match_labels=decode_rules(row["rules"]).match_labels,
                labels=frozenset(row["labels"] or ()),
                task_type=row["task_type"],
                queued=row["queued"],
                running=row["running"],
            )
            for row in await self._database.fetch("count_demand")
        ]


class DurationTable:
    """Reads and writes durations by task type."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def add(self, counts: Mapping[tuple[int, int], int]) -> None:
        """Adds counts by (task type, bucket) in one commit."""
        rows = [(task_type, bucket, count) for (task_type, bucket), count in counts.items()]
        await self._database.fetch("add_durations", *columns(rows, 3))

    async def read(self, task_types: Sequence[int]) -> Mapping[int, DurationSketch]:
        """Returns the sketches of task types."""
        found: dict[int, DurationSketch] = {}
        for row in await self._database.fetch("read_durations", task_types):
            found.setdefault(row["task_type"], DurationSketch()).add(row["bucket"], row["count"])
        return found


def terms_of(row: asyncpg.Record) -> QueueTerms:
    """Decodes the columns weight, max_running, max_queued and rules of a project."""
    return QueueTerms(
        weight=row["weight"],
        max_running=row["max_running"],
        max_queued=row["max_queued"],
        rules=decode_rules(row["rules"]),
        paused_agents=frozenset(row.get("paused_agents") or ()),
        is_paused=row.get("is_paused", False),
        order_revision=row.get("order_revision", 0),
    )


def _durations(row: asyncpg.Record) -> TaskTypeDurations:
    sketch = DurationSketch()
    for bucket, count in zip(row["buckets"], row["counts"], strict=True):
        sketch.add(bucket, count)
    return TaskTypeDurations(
        task_type=row["name"], samples=row["total"], p50_s=sketch.quantile_s(0.5), p95_s=sketch.quantile_s(0.95)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PriorityCount:
    """The live rollouts of one priority; `oldest_age_s` is the age of the oldest that may run now, seconds."""

    priority: int
    queued: int
    running: int
    delayed: int
    oldest_age_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskTypeDurations:
    """Durations of one task type's successful attempts, seconds."""

    task_type: str
    samples: int
    p50_s: float
    p95_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectQueue:
    """How a project's queue is served.

    Attributes:
        project: Name of the project.
        runners: Number of live runner sessions.
        paused_at: When it was paused; None if it is not.
        pause_reason: Why it was paused.
    """

    project: str
    terms: QueueTerms
    runners: int
    paused_at: datetime.datetime | None
    pause_reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueStats:
    """Statistics of a queue, and how it is served.

    Attributes:
        priorities: Counts by priority, highest first.
        task_types: Durations by task type, most frequent first.
        paused_agents: Paused agent versions, most recently paused first.
        labels: Counts by required labels, those with most waiting rollouts first.
    """

    priorities: Sequence[PriorityCount]
    task_types: Sequence[TaskTypeDurations]
    paused_agents: Sequence[PausedAgent]
    queue: ProjectQueue
    labels: Sequence[LabelCount] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelCount:
    """The live rollouts that require the same labels, `key=value`, and are not delayed."""

    labels: frozenset[str]
    queued: int
    running: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedQueue:
    """A project's queue beside others; `paused_at` is None if it is not paused."""

    project: str
    terms: QueueTerms
    queued: int
    running: int
    paused_at: datetime.datetime | None
    pause_reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PausedAgent:
    """A paused agent version, and the latest rollouts that lost their runners."""

    agent: str
    paused_at: datetime.datetime
    rollouts: Sequence[UUID]


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueCount:
    """A project's quota of waiting rollouts (None means unlimited) and their number (0 without a quota)."""

    max_queued: int | None
    queued: int
